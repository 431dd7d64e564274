// test_fully_shard_autograd.py: outputs and modules that a backward does not use, activations inside containers, users' hooks.
#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {

// A forward's argument and result of the user's own type: the overload of visit_tensors is found beside it.
struct Named {
  at::Tensor x, y;
  int64_t rows = 0;
};
template <class F>
void visit_tensors(Named& v, F&& f) {
  f(v.x), f(v.y);
}

namespace {

constexpr int64_t kDim = 12;

class FullyShardAutograd : public ::testing::TestWithParam<int> {
 protected:
  static int size() { return GetParam(); }
  static std::vector<Reshard> reshards() {
    std::vector<Reshard> all = {true, false};
    if (size() % 2 == 0) all.push_back(2);
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, FullyShardAutograd, ::testing::Values(1, 2, 3, 4));

Inputs inputs(const Rank& world, int64_t dim = kDim) {
  return [random = random_inputs(world, {2, dim}, at::kDouble)](int i, int rank) { return at::sigmoid(random(i, rank)); };
}

struct DoubleLinearImpl : torch::nn::Module {
  explicit DoubleLinearImpl(bool second) : uses_second(second) {
    lin1 = register_module("lin1", torch::nn::Linear(kDim, kDim));
    lin2 = register_module("lin2", torch::nn::Linear(kDim, kDim));
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    auto first = at::relu(lin1(x));
    return {first, uses_second ? at::relu(lin2(x)) : at::Tensor()};
  }
  Hooked<torch::nn::Linear> lin1{nullptr}, lin2{nullptr};
  bool uses_second;
};
FSDPP_MODULE(DoubleLinear);

// Both outputs in the first iterations, then one: what hangs on the other gets no gradient.
Trainee first_both_then_one(DoubleLinear net) {
  return {net.ptr(), [net](const at::Tensor& x, int i) mutable {
            auto [a, b] = net(x);
            return i < 3 ? (a * b).sum() : a.sum();
          }};
}

TEST_P(FullyShardAutograd, UnusedForwardOutput) {
  for (auto reshard : reshards())
    each_rank(size(), [&](Rank world) {
      auto sharded = filled_float64(DoubleLinear(true), *world), plain = filled_float64(DoubleLinear(true), *world);
      auto mesh = Mesh::shard(world);
      FullyShardOptions options{.reshard_after_forward = reshard};
      auto first = fully_shard(sharded->lin1, mesh, options), root = fully_shard(sharded, mesh, options);
      EventLog log(EventLog::What::Units);
      auto parity = float64_parity();
      parity.after_backwards = [&] {
        EXPECT_EQ(count_events(log.take(), "post_backward lin1"), 1);
        EXPECT_EQ(first.stats().reduces, 1);
        first.reset_stats();
      };
      expect_train_parity(*world, first_both_then_one(sharded), first_both_then_one(plain), inputs(world), parity);
      EXPECT_EQ(root.stats().reduces, 3) << "not in the iterations whose loss leaves its only layer out";
    });
}

// The second layer is a unit that forward never calls: never gathered, never reduced, no gradient.
TEST_P(FullyShardAutograd, UnusedForwardModule) {
  for (auto reshard : reshards())
    each_rank(size(), [&](Rank world) {
      auto sharded = filled_float64(DoubleLinear(false), *world), plain = filled_float64(DoubleLinear(false), *world);
      auto mesh = Mesh::shard(world);
      FullyShardOptions options{.reshard_after_forward = reshard};
      fully_shard(sharded->lin1, mesh, options);
      auto unused = fully_shard(sharded->lin2, mesh, options);
      fully_shard(sharded, mesh, options);
      auto first_output = [](DoubleLinear net) {
        return Trainee{net.ptr(), [net](const at::Tensor& x, int) mutable { return net(x).first.sum(); }};
      };
      EventLog log(EventLog::What::UnitsAndCollectives);
      expect_train_parity(*world, first_output(sharded), first_output(plain), inputs(world), float64_parity());
      auto events = log.take();
      std::erase_if(events, [](auto& e) { return !e.ends_with("lin2"); });
      EXPECT_THAT(events, ::testing::Each(::testing::StartsWith("all_gather"))) << "by full_tensor only";
      EXPECT_EQ(unused.stats().gathers, 0);
      EXPECT_FALSE(sharded->lin2->weight.grad().defined());
    });
}

// -- containers ----------------------------------------------------------------------------------------------------------

template <class C>
struct Container;
template <>
struct Container<std::vector<at::Tensor>> {
  static std::vector<at::Tensor> of(const at::Tensor& x) { return {x}; }
  static at::Tensor& in(std::vector<at::Tensor>& c) { return c[0]; }
};
template <>
struct Container<std::tuple<at::Tensor>> {
  static std::tuple<at::Tensor> of(const at::Tensor& x) { return {x}; }
  static at::Tensor& in(std::tuple<at::Tensor>& c) { return std::get<0>(c); }
};
template <>
struct Container<std::map<std::string, at::Tensor>> {
  static std::map<std::string, at::Tensor> of(const at::Tensor& x) { return {{"x", x}}; }
  static at::Tensor& in(std::map<std::string, at::Tensor>& c) { return c.at("x"); }
};
template <>
struct Container<std::optional<std::pair<int, at::Tensor>>> {
  using C = std::optional<std::pair<int, at::Tensor>>;
  static C of(const at::Tensor& x) { return std::pair{7, x}; }
  static at::Tensor& in(C& c) { return c->second; }
};
template <>
struct Container<Named> {
  static Named of(const at::Tensor& x) { return {x, at::ones_like(x), x.size(0)}; }
  static at::Tensor& in(Named& c) { return c.x; }
};

struct WrapsImpl : torch::nn::Module {
  WrapsImpl() {
    lin1 = register_module("lin1", torch::nn::Linear(kDim, kDim));
    lin2 = register_module("lin2", torch::nn::Linear(kDim, kDim));
  }
  template <class C>
  C forward(C container) {
    auto& x = Container<C>::in(container);
    x = at::relu(lin2(at::relu(lin1(x))));
    return container;
  }
  torch::nn::Linear lin1{nullptr}, lin2{nullptr};
};
FSDPP_MODULE(Wraps);

template <class C>
struct WrapStackImpl : torch::nn::Module {
  WrapStackImpl() {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module("layer" + std::to_string(i), Wraps()));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto c = Container<C>::of(x);
    for (auto& l : layers) c = l(c);
    return Container<C>::in(c);
  }
  std::vector<Wraps> layers;
};

template <class C>
class NontensorActivations : public ::testing::Test {};
using Containers = ::testing::Types<std::vector<at::Tensor>, std::tuple<at::Tensor>, std::map<std::string, at::Tensor>,
                                    std::optional<std::pair<int, at::Tensor>>, Named>;
TYPED_TEST_SUITE(NontensorActivations, Containers);

// Were a hook on an output missing, its unit would be gathered on demand and reduced at the end: the order of events shows it.
TYPED_TEST(NontensorActivations, TrainAndAreHookedInEveryContainer) {
  for (int size : {1, 2, 3})
    each_rank(size, [&](Rank world) {
      using Stack = fsdpp::ModuleHolder<WrapStackImpl<TypeParam>>;
      auto make = [&] { return filled_float64(Stack(std::make_shared<WrapStackImpl<TypeParam>>()), *world); };
      Stack sharded = make(), plain = make();
      auto mesh = Mesh::shard(world);
      for (auto& l : sharded->layers) fully_shard(l, mesh);
      fully_shard(sharded, mesh);
      EventLog log;
      auto parity = float64_parity();
      parity.after_backwards = [&] {
        auto events = log.take_without({"reshard"});
        std::vector<std::string> want = {"unshard layer2",       "unshard layer1",       "post_backward layer2",
                                         "unshard layer0",       "post_backward layer1", "post_backward layer0"};
        std::vector<std::string> alone = {"unshard layer2",       "post_backward layer2", "unshard layer1",
                                          "post_backward layer1", "unshard layer0",       "post_backward layer0"};
        ASSERT_GE(events.size(), want.size());
        std::vector<std::string> last(events.end() - static_cast<std::ptrdiff_t>(want.size()), events.end());
        EXPECT_EQ(last, world->size() == 1 ? alone : want) << "nothing is gathered ahead on one rank";
      };
      expect_train_parity(*world, trainee(sharded), trainee(plain), inputs(world), parity);
    });
}

// -- users' hooks --------------------------------------------------------------------------------------------------------

// A tensor hook sees the gradient of the whole parameter, once a backward and before the reduction; what it returns is reduced.
TEST_P(FullyShardAutograd, TensorHooksOnParametersRun) {
  for (bool before_sharding : {true, false})
    each_rank(size(), [&](Rank world) {
      auto sharded = filled_float64(Mlp(kDim), *world), plain = filled_float64(Mlp(kDim), *world);
      int calls = 0;
      auto hook = [&] {
        sharded->out_proj->bias.register_hook([&](const at::Tensor& g) {
          ++calls;
          EXPECT_EQ(g.sizes(), (std::vector<int64_t>{kDim}));
          return g * 2;
        });
      };
      plain->out_proj->bias.register_hook([](const at::Tensor& g) { return g * 2; });
      auto mesh = Mesh::shard(world);
      if (before_sharding) hook();
      fully_shard(sharded->in_proj, mesh), fully_shard(sharded->out_proj, mesh), fully_shard(sharded, mesh);
      if (!before_sharding) hook();
      expect_train_parity(*world, trainee(sharded), trainee(plain), inputs(world), float64_parity());
      EXPECT_EQ(calls, 10);
    });
}

}  // namespace
}  // namespace fsdpp::test::suite
