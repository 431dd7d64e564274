// test_fully_shard_mixed_precision.py: dtypes of compute, reduction, inputs and outputs, against references made by hand.
#include <torch/optim/adam.h>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {

// Structured activations, one of them nested.
struct TwoTensors {
  at::Tensor x, y;
};
template <class F>
void visit_tensors(TwoTensors& v, F&& f) {
  f(v.x), f(v.y);
}
struct Nested {
  TwoTensors inner;
  at::Tensor z;
};
template <class F>
void visit_tensors(Nested& v, F&& f) {
  visit_tensors(v.inner, f), f(v.z);
}

namespace {

constexpr int64_t kDim = 8;
constexpr int kIterations = 10;
using OptionalDtype = std::optional<c10::ScalarType>;

/// What a comparison with the reference does.
struct Dtypes {
  OptionalDtype param, reduce;
  int micro_batches = 1;  ///< reduced at the last one only
};
void expect_reference_training(const Rank& world, Reshard reshard, const Dtypes& dtypes);

class MixedPrecision : public ::testing::TestWithParam<int> {
 protected:
  static void expect_reference_training_of(const Dtypes& dtypes) {
    for (auto reshard : reshards()) each_rank(size(), [&](Rank world) { expect_reference_training(world, reshard, dtypes); });
  }
  static int size() { return GetParam(); }
  static std::vector<Reshard> reshards() {
    std::vector<Reshard> all = {false, true};
    if (size() % 2 == 0) all.push_back(2);
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, MixedPrecision, ::testing::Values(1, 2, 3, 4));

/// Training by hand: a master in fp32, and for each rank and micro-batch gradients of a copy in the compute dtype, which are
/// rounded to the reduce dtype, summed (over micro-batches first) and divided by the number of ranks.
struct Reference {
  Reference(const World& world, c10::ScalarType param, c10::ScalarType reduce)
      : ranks(world.size()), param_dtype(param), reduce_dtype(reduce), master(filled(MlpStack(kDim, 3), world)),
        adam(master->parameters(), torch::optim::AdamOptions(1e-2)) {
    // fp16 is divided in two halves, so that neither the parts nor the sum leave its range: for 2 to 4 ranks by 2 before the sum.
    if (ranks == 1) reduce_dtype = at::kFloat;  // nothing goes on the wire, nothing is rounded for it
    pre_scale = reduce == at::kHalf && ranks > 1 ? 0.5 : 1.0;
  }

  /// Loss of `rank`, with this reference's current weights; its gradients are added to that rank's.
  at::Tensor backward(const at::Tensor& input, int rank) {
    auto compute = MlpStack(kDim, 3);
    compute->to(param_dtype);
    auto to = compute->parameters(), from = master->parameters();
    {
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    }
    auto loss = compute(input.to(param_dtype)).sum();
    loss.backward();
    auto& sums = unreduced[static_cast<size_t>(rank)];
    for (size_t i = 0; i < to.size(); ++i) {
      auto g = (to[i].grad().to(at::kFloat) * pre_scale).to(reduce_dtype);
      if (sums.size() <= i)
        sums.push_back(g);
      else
        sums[i] += g;
    }
    return loss.detach();
  }

  void step() {
    auto params = master->parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      auto sum = unreduced[0][i].to(at::kFloat);
      for (int r = 1; r < ranks; ++r) sum = sum + unreduced[static_cast<size_t>(r)][i].to(at::kFloat);
      params[i].mutable_grad() = sum.to(reduce_dtype).to(at::kFloat) * static_cast<float>(1.0 / ranks / pre_scale);
    }
    adam.step();
    unreduced.assign(unreduced.size(), {});
  }

  int ranks;
  c10::ScalarType param_dtype, reduce_dtype;
  MlpStack master;
  torch::optim::Adam adam;
  double pre_scale = 1;
  std::vector<std::vector<at::Tensor>> unreduced = std::vector<std::vector<at::Tensor>>(static_cast<size_t>(ranks));  // by rank
};

void expect_reference_training(const Rank& world, Reshard reshard, const Dtypes& dtypes) {
  auto param = dtypes.param.value_or(at::kFloat), reduce = dtypes.reduce.value_or(param);
  Reference reference(*world, param, reduce);
  auto net = filled(MlpStack(kDim, 3), *world);
  auto mesh = Mesh::shard(world);
  FullyShardOptions options{.reshard_after_forward = reshard};
  options.mp_policy = {.param_dtype = dtypes.param, .reduce_dtype = dtypes.reduce};
  for (auto& m : net->mlps) fully_shard(m, mesh, options);
  auto root = fully_shard(net, mesh, options);
  std::vector<c10::ScalarType> gathered, reduced;
  world->watch = [&](const WireCall& call) {
    if (call.op == "all_gather" && call.label != "model check") gathered.push_back(call.dtype);
    if (call.op == "reduce_scatter") reduced.push_back(call.dtype);
  };
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(1e-2));
  auto inputs = random_inputs(world, {4, kDim});
  for (int i = 0; i < kIterations; ++i) {
    adam.zero_grad(i % 2 == 0);
    for (int k = 0; k < dtypes.micro_batches; ++k) {
      root.set_requires_gradient_sync(k == dtypes.micro_batches - 1);
      auto input = [&](int rank) { return inputs(i * dtypes.micro_batches + k, rank); };
      at::Tensor want;
      for (int r = 0; r < world->size(); ++r) {
        auto loss = reference.backward(input(r), r);
        if (r == world->rank()) want = loss;
      }
      auto loss = net(input(world->rank())).sum();
      EXPECT_EQ(loss.scalar_type(), param);
      EXPECT_TRUE(at::equal(loss.detach(), want)) << "iteration " << i;
      loss.backward();
    }
    adam.step();
    reference.step();
  }
  EXPECT_THAT(gathered, ::testing::Each(param));
  EXPECT_THAT(reduced, ::testing::Each(reduce));
  EXPECT_EQ(reduced.size(), world->size() > 1 ? 3u * kIterations : 0u);
  for (auto& p : net->parameters()) EXPECT_TRUE(p.scalar_type() == at::kFloat && p.grad().scalar_type() == at::kFloat);
  expect_same_parameters(*net, *reference.master, 0, 0);
}

TEST_P(MixedPrecision, ComputeDtype) {
  for (auto dtype : {at::kBFloat16, at::kHalf}) expect_reference_training_of({dtype, std::nullopt});
}
TEST_P(MixedPrecision, ReduceDtypeFp32Reduce) { expect_reference_training_of({at::kBFloat16, at::kFloat}); }
TEST_P(MixedPrecision, ReduceDtypeBf16Reduce) { expect_reference_training_of({at::kFloat, at::kBFloat16}); }
TEST_P(MixedPrecision, GradAccWithReduceDtype) { expect_reference_training_of({at::kBFloat16, at::kFloat, 4}); }

// -- frozen at first -----------------------------------------------------------------------------------------------------

struct WithIntegerImpl : torch::nn::Module {
  WithIntegerImpl() {
    a = register_module("a", torch::nn::Linear(kDim, kDim));
    b = register_module("b", torch::nn::Linear(kDim, kDim));
    count = register_parameter("count", at::ones({kDim}, at::kLong), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) {
    EXPECT_EQ(count.scalar_type(), at::kLong) << "only floating-point parameters are cast";
    EXPECT_EQ(count.sum().item<int64_t>(), kDim);
    return b(a(x));
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
  at::Tensor count;
};
FSDPP_MODULE(WithInteger);

TEST_P(MixedPrecision, ReduceDtypeAfterFrozenFirstForward) {
  each_rank(size(), [](Rank world) {
    auto net = filled(WithInteger(), *world);
    { at::NoGradGuard no_grad; net->count.fill_(1); }
    fully_shard(net, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    auto floats = [&] { return std::vector<at::Tensor>{net->a->weight, net->a->bias, net->b->weight, net->b->bias}; };
    for (auto& p : floats()) p.requires_grad_(false);
    auto x = random_input(*world, {4, kDim}, 1);
    { at::NoGradGuard no_grad; (void)net(x); }
    for (auto& p : floats()) p.requires_grad_(true);
    std::vector<c10::ScalarType> reduced;
    world->watch = [&](const WireCall& call) {
      if (call.op == "reduce_scatter") reduced.push_back(call.dtype);
    };
    net(x).sum().backward();
    EXPECT_THAT(reduced, world->size() > 1 ? std::vector<c10::ScalarType>{at::kFloat} : std::vector<c10::ScalarType>{});
    for (auto& p : floats()) {
      ASSERT_TRUE(p.grad().defined());
      EXPECT_EQ(p.grad().scalar_type(), at::kFloat);
    }
  });
}

// -- structured inputs and outputs ---------------------------------------------------------------------------------------

struct StructuredImpl : torch::nn::Module {
  StructuredImpl() { layer = register_module("layer", torch::nn::Linear(kDim, kDim)); }
  TwoTensors forward(TwoTensors v) { return {layer(v.x), layer(v.y)}; }
  Nested forward(Nested v) { return {{layer(v.inner.x), layer(v.inner.y)}, layer(v.z)}; }
  std::pair<at::Tensor, at::Tensor> forward(std::pair<at::Tensor, at::Tensor> v) { return {layer(v.first), layer(v.second)}; }
  torch::nn::Linear layer{nullptr};
};
FSDPP_MODULE(Structured);

template <class T>
T structured(const at::Tensor& x) {
  if constexpr (std::is_same_v<T, Nested>)
    return {{x, x.clone()}, x.clone()};
  else
    return {x, x.clone()};
}
template <class T>
at::Tensor joined(T v) {
  using fsdpp::visit_tensors;
  at::Tensor sum;
  visit_tensors(v, [&](at::Tensor& t) { sum = sum.defined() ? sum + t : t; });
  return sum;
}

template <class T>
struct StructuredStackImpl : torch::nn::Module {
  StructuredStackImpl() {
    a = register_module("a", Structured());
    b = register_module("b", Structured());
  }
  at::Tensor forward(const at::Tensor& x) { return joined(b(a(structured<T>(x)))); }
  Structured a{nullptr}, b{nullptr};
};

// Without casts training parity; with casts: inside the structures too, or the layers' matrix products would throw.
template <class T>
void structured_input_output(const Rank& world, const MixedPrecisionPolicy& policy) {
  using Stack = fsdpp::ModuleHolder<StructuredStackImpl<T>>;
  auto make = [&] {
    Stack stack(std::make_shared<StructuredStackImpl<T>>());
    return policy.param_dtype ? filled(stack, *world) : filled_float64(stack, *world);
  };
  auto sharded = make(), plain = make();
  auto mesh = Mesh::shard(world);
  FullyShardOptions options{.mp_policy = policy};
  fully_shard(sharded->a, mesh, options), fully_shard(sharded->b, mesh, options), fully_shard(sharded, mesh, options);
  auto random = random_inputs(world, {2, kDim}, policy.param_dtype ? at::kFloat : at::kDouble);
  auto input = [&](int i, int rank) { return at::sigmoid(random(i, rank)); };
  if (!policy.param_dtype) return expect_train_parity(*world, trainee(sharded), trainee(plain), input, float64_parity());
  auto out = sharded(input(0, world->rank()));
  EXPECT_EQ(out.scalar_type(), *policy.param_dtype);
  out.sum().backward();
  for (int r = 0; r < world->size(); ++r) (plain(input(0, r)).sum() / world->size()).backward();
  expect_same_parameters(*sharded, *plain, 0, 0.02);
}

TEST_P(MixedPrecision, StructuredInputOutput) {
  for (auto& policy : {MixedPrecisionPolicy{}, MixedPrecisionPolicy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16},
                       MixedPrecisionPolicy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}})
    each_rank(size(), [&](Rank world) {
      structured_input_output<TwoTensors>(world, policy);
      structured_input_output<Nested>(world, policy);
      structured_input_output<std::pair<at::Tensor, at::Tensor>>(world, policy);
    });
}

// -- casts of inputs and outputs -----------------------------------------------------------------------------------------

/// Remembers the dtype in which its input came; casts it to its weight's by itself if told so.
struct InputDtypeImpl : torch::nn::Module {
  InputDtypeImpl() { layer = register_module("layer", torch::nn::Linear(kDim, kDim)); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& external = {}) {
    seen = x.scalar_type();
    if (external.defined()) seen_external = external.scalar_type();
    return layer(casts_itself ? x.to(layer->weight.scalar_type()) : x);
  }
  torch::nn::Linear layer{nullptr};
  bool casts_itself = false;
  c10::ScalarType seen = at::kLong, seen_external = at::kLong;
};
FSDPP_MODULE(InputDtype);

struct TwoInputDtypesImpl : torch::nn::Module {
  TwoInputDtypesImpl() {
    c1 = register_module("c1", InputDtype());
    c2 = register_module("c2", InputDtype());
  }
  at::Tensor forward(const at::Tensor& x) {
    seen = x.scalar_type();
    auto y = c1(x);
    return gives_external ? c2(y, at::ones({2, kDim}, x.options().dtype(at::kFloat))) : c2(y);
  }
  InputDtype c1{nullptr}, c2{nullptr};
  bool gives_external = false;
  c10::ScalarType seen = at::kLong;
};
FSDPP_MODULE(TwoInputDtypes);

using Seen = std::array<c10::ScalarType, 3>;  // by the root, c1, c2
Seen seen_after_a_step(TwoInputDtypes& net, const World& world) {
  net(at::zeros({2, kDim}, at::TensorOptions(world.device()))).sum().backward();
  for (auto& p : net->parameters()) EXPECT_EQ(p.grad().scalar_type(), at::kFloat);
  return {net->seen, net->c1->seen, net->c2->seen};
}

TEST_P(MixedPrecision, Float16OnOneSubmodule) {
  each_rank(size(), [](Rank world) {
    auto mesh = Mesh::shard(world);
    MixedPrecisionPolicy half{.param_dtype = at::kHalf}, half_uncast{.param_dtype = at::kHalf, .cast_forward_inputs = false},
        half_then_float{.param_dtype = at::kHalf, .output_dtype = at::kFloat};
    {  // on the second: its input is cast for it
      auto net = filled(TwoInputDtypes(), *world);
      fully_shard(net->c2, mesh, {.mp_policy = half}), fully_shard(net, mesh);
      EXPECT_EQ(seen_after_a_step(net, *world), (Seen{at::kFloat, at::kFloat, at::kHalf}));
    }
    {  // on the second, which casts by itself
      auto net = filled(TwoInputDtypes(), *world);
      net->c2->casts_itself = true;
      fully_shard(net->c2, mesh, {.mp_policy = half_uncast}), fully_shard(net, mesh);
      EXPECT_EQ(seen_after_a_step(net, *world), (Seen{at::kFloat, at::kFloat, at::kFloat}));
    }
    {  // on the first, whose output is cast back
      auto net = filled(TwoInputDtypes(), *world);
      fully_shard(net->c1, mesh, {.mp_policy = half_then_float}), fully_shard(net, mesh);
      EXPECT_EQ(seen_after_a_step(net, *world), (Seen{at::kFloat, at::kHalf, at::kFloat}));
    }
  });
}

TEST_P(MixedPrecision, SubmodulesWithExternalInputs) {
  for (bool casts : {false, true})
    each_rank(size(), [&](Rank world) {
      auto net = filled(TwoInputDtypes(), *world);
      net->gives_external = true;
      auto mesh = Mesh::shard(world);
      fully_shard(net->c2, mesh, {.mp_policy = {.param_dtype = at::kHalf, .cast_forward_inputs = casts}});
      fully_shard(net, mesh, {.mp_policy = {.param_dtype = at::kHalf}});
      EXPECT_EQ(seen_after_a_step(net, *world), (Seen{at::kHalf, at::kHalf, at::kHalf}));
      EXPECT_EQ(net->c2->seen_external, casts ? at::kHalf : at::kFloat);
    });
}

// A model that is bf16 to begin with, and possibly converted to fp32 once it is sharded: reduced in bf16 all the same, as asked.
TEST_P(MixedPrecision, ClampReduceDtype) {
  for (auto model_dtype : {at::kBFloat16, at::kFloat})
    each_rank(size(), [&](Rank world) {
      auto net = filled(MlpStack(kDim, 2), *world);
      net->to(at::kBFloat16);
      auto mesh = Mesh::shard(world);
      FullyShardOptions options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16}};
      for (auto& m : net->mlps) fully_shard(m, mesh, options);
      fully_shard(net, mesh, options);
      net->to(model_dtype);
      std::vector<c10::ScalarType> reduced;
      world->watch = [&](const WireCall& call) {
        if (call.op == "reduce_scatter") reduced.push_back(call.dtype);
      };
      net(random_input(*world, {4, kDim}, 1)).sum().backward();
      EXPECT_EQ(reduced.size(), world->size() > 1 ? 2u : 0u);
      EXPECT_THAT(reduced, ::testing::Each(at::kBFloat16));
      for (auto& p : net->parameters()) EXPECT_EQ(p.grad().scalar_type(), model_dtype);
    });
}

}  // namespace
}  // namespace fsdpp::test::suite
