// test_fully_shard_training.py on units of several modules of which a forward runs only some (a loss computed in chunks).
#include <torch/optim/adam.h>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

constexpr int64_t kVocab = 11, kDim = 6;
constexpr int kChunks = 4;

struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(at::Tensor w) { weight = register_parameter("weight", std::move(w)); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};
FSDPP_MODULE(Head);
struct NormImpl : torch::nn::Module {
  NormImpl() { weight = register_parameter("weight", at::ones({kDim})); }
  at::Tensor forward(const at::Tensor& x) { return at::layer_norm(x, {kDim}, weight); }
  at::Tensor weight;
};
FSDPP_MODULE(Norm);

struct ChunkedImpl : torch::nn::Module {
  explicit ChunkedImpl(bool tied) {
    embed = register_module("embed", torch::nn::Embedding(kVocab, kDim));
    body = register_module("body", torch::nn::Linear(torch::nn::LinearOptions(kDim, kDim).bias(false)));
    norm = register_module("norm", Norm());
    head = register_module("head", Head(tied ? embed->weight : at::zeros({kVocab, kDim})));
  }
  at::Tensor forward(const at::Tensor& ids, bool skip_head = false) {
    auto h = norm(body(embed(ids)));
    return skip_head ? h : head(h);
  }
  Hooked<torch::nn::Embedding> embed{nullptr};
  Hooked<torch::nn::Linear> body{nullptr};
  Norm norm{nullptr};
  Head head{nullptr};
};
FSDPP_MODULE(Chunked);

at::Tensor batch(uint64_t seed) { return tokens(seed, kVocab, 2, 8); }

// How a model is cut into units; the policy of [norm, head] and that of the others.
struct Cut {
  bool grouped = true, tied = false;
  Reshard reshard = true;
  MixedPrecisionPolicy group_policy = {}, policy = {};
};

// Returns the unit with the head.
UnitHandle shard(Chunked& net, const std::shared_ptr<Mesh>& mesh, const Cut& cut) {
  FullyShardOptions others{.mp_policy = cut.policy, .reshard_after_forward = cut.reshard};
  FullyShardOptions group{.mp_policy = cut.group_policy, .reshard_after_forward = cut.reshard};
  fully_shard(net->body, mesh, others);
  std::optional<UnitHandle> unit;
  if (cut.tied) {
    unit = fully_shard({net->embed.ptr(), net->norm.ptr(), net->head.ptr()}, mesh, group);
  } else {
    fully_shard(net->embed, mesh, others);
    if (cut.grouped) unit = fully_shard({net->norm.ptr(), net->head.ptr()}, mesh, group);
    if (!cut.grouped) fully_shard(net->norm, mesh, group), unit = fully_shard(net->head, mesh, group);
  }
  fully_shard(net, mesh, others);
  return *unit;
}

struct ChunkedLoss {
  double loss = 0;
  std::vector<at::Tensor> head_grads;  // after each chunk, as the handle shows them, if it has one
};

// The head is run and differentiated chunk by chunk, then the rest of the model.
ChunkedLoss chunked_backward(Chunked& net, const at::Tensor& ids, c10::ScalarType dtype = at::kFloat) {
  ChunkedLoss result;
  auto h = net(ids, /*skip_head=*/true);
  EXPECT_EQ(h.scalar_type(), dtype);
  std::vector<at::Tensor> grads;
  for (auto& part : h.detach().to(at::kFloat).chunk(kChunks, 1)) {
    auto chunk = part.clone().requires_grad_();
    auto out = net->head(chunk);
    EXPECT_EQ(out.scalar_type(), dtype);
    auto loss = out.to(at::kFloat).square().sum();
    loss.backward();
    result.loss += loss.template item<double>();
    grads.push_back(chunk.grad());
    if (auto& g = net->head->weight.grad(); g.defined()) result.head_grads.push_back(g.clone());
  }
  h.backward(at::cat(grads, 1).to(h.scalar_type()));
  return result;
}

class Grouping : public ::testing::TestWithParam<int> {
 protected:
  static int size() { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Grouping, ::testing::Values(1, 2, 3));

// `ids` are the same on all ranks, so that the plain model needs no other rank's.
void expect_chunked_parity(const Rank& world, const Cut& cut) {
  auto sharded = filled(Chunked(cut.tied), *world), plain = filled(Chunked(cut.tied), *world);
  auto unit = shard(sharded, Mesh::shard(world), cut);
  torch::optim::AdamOptions options(1e-2);
  torch::optim::Adam adam(sharded->parameters(), options), plain_adam(plain->parameters(), options);
  for (int i = 0; i < 10; ++i) {
    unit.reset_stats();
    auto got = chunked_backward(sharded, batch(i)), want = chunked_backward(plain, batch(i));
    EXPECT_NEAR(got.loss, want.loss, 1e-6 * want.loss) << "iteration " << i;
    EXPECT_EQ(unit.stats().reduces, kChunks + 1) << "one for each backward";
    for (int c = 0; c < kChunks; ++c) {
      auto full = shard::full_tensor(sharding_of(sharded->head->weight), got.head_grads[static_cast<size_t>(c)]);
      EXPECT_LE(relative_error(full, want.head_grads[static_cast<size_t>(c)]), 5e-6) << "iteration " << i << " chunk " << c;
    }
    expect_same_parameters(*sharded, *plain, 1e-6, 5e-6);
    expect_sharded(*sharded);
    adam.step(), plain_adam.step();
    adam.zero_grad(i % 2 == 0), plain_adam.zero_grad(i % 2 == 0);
  }
}

TEST_P(Grouping, PartialGroupForwardThenStandalone) {
  for (bool is_tied : {false, true})
    for (Reshard reshard : {Reshard{true}, Reshard{false}, Reshard{1}})
      each_rank(size(), [&](Rank world) { expect_chunked_parity(world, {.tied = is_tied, .reshard = reshard}); });
}

// With casts: one unit of two modules computes bit for bit what two units compute.
TEST_P(Grouping, PartialGroupForwardThenStandaloneWithOutputDtype) {
  MixedPrecisionPolicy bf16_out{.param_dtype = at::kFloat, .output_dtype = at::kBFloat16}, fp32{.param_dtype = at::kFloat};
  for (auto& root_policy : {bf16_out, fp32})
    for (bool reshard : {true, false})
      each_rank(size(), [&](Rank world) {
        auto one = filled(Chunked(false), *world), two = filled(Chunked(false), *world);
        auto mesh = Mesh::shard(world);
        shard(one, mesh, {.grouped = true, .reshard = reshard, .group_policy = bf16_out, .policy = root_policy});
        shard(two, mesh, {.grouped = false, .reshard = reshard, .group_policy = bf16_out, .policy = root_policy});
        for (int i = 0; i < 3; ++i) {
          auto ids = batch(10 * i + world->rank());
          EXPECT_EQ(chunked_backward(one, ids, at::kBFloat16).loss, chunked_backward(two, ids, at::kBFloat16).loss);
        }
        auto a = one->parameters(), b = two->parameters();
        for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(full_grad(a[i]), full_grad(b[i]))) << "parameter " << i;
      });
}

struct TwoLinearsImpl : torch::nn::Module {
  TwoLinearsImpl() {
    a = register_module("a", torch::nn::Linear(torch::nn::LinearOptions(kDim, kDim).bias(false)));
    b = register_module("b", torch::nn::Linear(torch::nn::LinearOptions(kDim, kDim).bias(false)));
  }
  at::Tensor forward(const at::Tensor& x) { return b(a(x).to(at::kFloat)); }  // b's input is fp32 and has to be cast
  Hooked<torch::nn::Linear> a{nullptr}, b{nullptr};
};
FSDPP_MODULE(TwoLinears);

TEST_P(Grouping, GroupedModuleCastForwardInputs) {
  each_rank(size(), [](Rank world) {
    auto net = filled(TwoLinears(), *world);
    auto mesh = Mesh::shard(world);
    FullyShardOptions options{.mp_policy = {.param_dtype = at::kBFloat16}};
    fully_shard({net->a.ptr(), net->b.ptr()}, mesh, options);
    fully_shard(net, mesh, options);
    auto out = net(random_input(*world, {2, kDim}, 1));
    EXPECT_EQ(out.scalar_type(), at::kBFloat16);
    out.sum().backward();
    for (auto& p : net->parameters()) EXPECT_EQ(p.grad().scalar_type(), at::kFloat);
  });
}

// Chunks and micro-batches: all that is kept unreduced comes in the last one, whether norm and head are one unit or two.
TEST_P(Grouping, PartialGroupForwardGradAccumChunked) {
  constexpr int kMicro = 3;
  for (bool reshard : {true, false})
    each_rank(size(), [&](Rank world) {
      auto one = filled(Chunked(false), *world), two = filled(Chunked(false), *world), plain = filled(Chunked(false), *world);
      auto mesh = Mesh::shard(world);
      auto unit = shard(one, mesh, {.grouped = true, .reshard = reshard});
      shard(two, mesh, {.grouped = false, .reshard = reshard});
      for (auto* net : {&one, &two})
        for (int k = 0; k < kMicro; ++k) {
          unit_of(**net).set_requires_gradient_sync(k == kMicro - 1);
          unit_of(**net).set_is_last_backward(k == kMicro - 1);
          chunked_backward(*net, batch(k));
        }
      for (int k = 0; k < kMicro; ++k) chunked_backward(plain, batch(k));
      expect_same_parameters(*one, *plain, 0, 5e-6);
      expect_same_parameters(*two, *plain, 0, 5e-6);
      EXPECT_EQ(unit.stats().reduces, kChunks + 1) << "those of the last micro-batch only";
    });
}

// reshard_after_forward and _backward switched off for the chunks: the unit is gathered once for all of them.
TEST_P(Grouping, PartialGroupReshardToggle) {
  for (bool is_tied : {false, true})
    for (bool initial : {false, true})
      each_rank(size(), [&](Rank world) {
        auto net = filled(Chunked(is_tied), *world);
        auto mesh = Mesh::shard(world);
        auto unit = shard(net, mesh, {.tied = is_tied, .reshard = initial});
        torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(1e-2));
        for (int i = 0; i < 5; ++i) {
          unit.reset_stats();
          auto toggle = [&](bool value) { unit.set_reshard_after_forward(value), unit.set_reshard_after_backward(value); };
          auto h = net(batch(i), true);
          EXPECT_EQ(unit.is_sharded(), initial);
          toggle(false);
          std::vector<at::Tensor> grads;
          auto gathers = unit.stats().gathers;
          for (auto& part : h.detach().chunk(kChunks, 1)) {
            auto chunk = part.clone().requires_grad_();
            net->head(chunk).sum().backward();
            grads.push_back(chunk.grad());
            EXPECT_FALSE(unit.is_sharded()) << "iteration " << i;
          }
          EXPECT_EQ(unit.stats().gathers - gathers, initial ? 1 : 0) << "at most once for all chunks";
          toggle(true);
          unit.reshard();
          EXPECT_TRUE(unit.is_sharded());
          h.backward(at::cat(grads, 1));
          if (!is_tied) {
            EXPECT_EQ(unit.stats().gathers, initial ? 3 : 2) << "forward, (chunks,) backward";
          }
          for (auto& p : net->parameters()) EXPECT_TRUE(p.grad().defined());
          expect_sharded(*net);
          if (!initial) unit.set_reshard_after_forward(false);
          adam.step();
          adam.zero_grad(i % 2 == 0);
        }
      });
}

TEST_P(Grouping, DoublePartialForwardThenBackward) {
  each_rank(size(), [](Rank world) {
    auto sharded = filled(Chunked(false), *world), plain = filled(Chunked(false), *world);
    auto mesh = Mesh::shard(world);
    auto unit = fully_shard({sharded->norm.ptr(), sharded->head.ptr()}, mesh);
    fully_shard(sharded, mesh);
    for (auto* net : {&sharded, &plain}) {
      auto a = (*net)(batch(1), true), b = (*net)(batch(2), true);
      (a.square().sum() + (b * 3).sum()).backward();
    }
    EXPECT_FALSE(sharded->head->weight.grad().defined());
    expect_same_parameters(*sharded, *plain, 0, 5e-6);
    EXPECT_EQ(unit.stats().reduces, 1);
    expect_sharded(*sharded);
  });
}

// An exception between the two modules of a unit; afterwards a step is as if nothing had happened.
struct FailsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (armed) throw std::runtime_error("boom");
    return x;
  }
  bool armed = true;
};
FSDPP_MODULE(Fails);
struct FailingImpl : torch::nn::Module {
  FailingImpl() {
    norm = register_module("norm", Norm());
    middle = register_module("middle", Fails());
    head = register_module("head", Head(at::zeros({kVocab, kDim})));
  }
  at::Tensor forward(const at::Tensor& x) { return head(middle(norm(x))); }
  Norm norm{nullptr};
  Fails middle{nullptr};
  Head head{nullptr};
};
FSDPP_MODULE(Failing);

TEST_P(Grouping, ResetIterStateAfterException) {
  each_rank(size(), [](Rank world) {
    auto sharded = filled(Failing(), *world), plain = filled(Failing(), *world);
    auto mesh = Mesh::shard(world);
    fully_shard({sharded->norm.ptr(), sharded->head.ptr()}, mesh);
    auto root = fully_shard(sharded, mesh);
    auto x = random_input(*world, {2, kDim}, 1);
    EXPECT_THROW((void)sharded(x), std::runtime_error);
    root.reset_iter_state();
    expect_sharded(*sharded);
    sharded->middle->armed = plain->middle->armed = false;
    sharded(x).square().sum().backward(), plain(x).square().sum().backward();
    expect_same_parameters(*sharded, *plain, 0, 5e-6);
  });
}

}  // namespace
}  // namespace fsdpp::test::suite
