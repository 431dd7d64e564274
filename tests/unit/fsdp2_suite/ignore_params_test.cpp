// After test_fully_shard_ignore_params.py: a model of which the middle is sharded, a part of that is left alone, and the rest is averaged as
// data parallelism would.
#include <torch/optim/adam.h>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

using ::testing::UnorderedElementsAre;

struct CImpl : torch::nn::Module {
  CImpl() { lin = register_module("lin", torch::nn::Linear(8, 8)); }
  at::Tensor forward(const at::Tensor& x) { return lin(x); }
  torch::nn::Linear lin{nullptr};
};
FSDPP_MODULE(C);
struct BImpl : torch::nn::Module {
  BImpl() {
    lin = register_module("lin", torch::nn::Linear(8, 8));
    c = register_module("c", C());
    subtrahend = register_parameter("subtrahend", at::ones({8, 8}));
  }
  at::Tensor forward(const at::Tensor& x) { return lin(c(x)) - subtrahend; }
  Hooked<torch::nn::Linear> lin{nullptr};
  C c{nullptr};
  at::Tensor subtrahend;
};
FSDPP_MODULE(B);
struct AImpl : torch::nn::Module {
  AImpl() {
    b = register_module("b", B());
    addend = register_parameter("addend", at::ones({8, 8}));
  }
  at::Tensor forward(const at::Tensor& x) { return (b(x) + addend).square().sum(); }
  B b{nullptr};
  at::Tensor addend;
};
FSDPP_MODULE(A);

/// What data parallelism does to parameters that no unit manages.
void average_gradients(const std::vector<at::Tensor>& params, comm::Communicator& comm) {
  for (auto& p : params) {
    auto grad = p.grad();
    auto stream = cuda::current_stream(grad.device());
    comm::Buffer buffer{grad.mutable_data_ptr(), grad.numel(), grad.scalar_type()};
    comm.all_reduce(buffer, buffer, comm::ReduceOp::Sum, stream, {}).wait(stream);
    grad.div_(comm.size());
  }
}

TEST(FullyShardIgnoreParams, DdpAFsdpBDdpC) {
  for (int ranks : {1, 2, 3})
    each_rank(ranks, [](Rank world) {
      auto mesh = Mesh::shard(world);
      auto sharded = filled(A(), *world), plain = filled(A(), *world);
      auto ignored = sharded->b->c->parameters();
      FullyShardOptions options{.mp_policy = {.cast_forward_inputs = false}, .ignored_params = ignored};
      fully_shard(sharded->b->lin, mesh, options);
      auto unit = fully_shard(sharded->b, mesh, options);
      std::vector<std::string> names;
      for (auto& p : sharded_parameters(*sharded)) names.push_back(p.name);
      EXPECT_THAT(names, UnorderedElementsAre("b.subtrahend", "b.lin.weight", "b.lin.bias"));
      EXPECT_EQ(unit.parameters().size(), 1u);
      for (auto& p : ignored) EXPECT_THROW((void)sharding_of(p), UsageError);

      auto comm = world->make_communicator("data parallel", {});
      auto rest = ignored;
      rest.push_back(sharded->addend);
      torch::optim::Adam ours(sharded->parameters(), torch::optim::AdamOptions(1e-2).eps(1e-3)), theirs(plain->parameters(), torch::optim::AdamOptions(1e-2).eps(1e-3));
      for (int step = 0; step < 3; ++step) {
        ours.zero_grad(), theirs.zero_grad();
        sharded(random_input(*world, {8, 8}, 10 * step + world->rank())).backward();
        average_gradients(rest, *comm);
        for (int r = 0; r < world->size(); ++r) (plain(random_input(*world, {8, 8}, 10 * step + r)) / world->size()).backward();
        ours.step(), theirs.step();
      }
      expect_same_parameters(*sharded->b->lin, *plain->b->lin, 1e-5, 1e-5);
      EXPECT_LT(relative_error(full_tensor(sharded->b->subtrahend), plain->b->subtrahend), 1e-5);
      EXPECT_LT(relative_error(sharded->addend, plain->addend), 1e-5);
      for (size_t i = 0; i < ignored.size(); ++i) {
        EXPECT_EQ(ignored[i].sizes(), plain->b->c->parameters()[i].sizes());
        EXPECT_LT(relative_error(ignored[i], plain->b->c->parameters()[i]), 1e-5);
      }
    });
}

// Ignored parameters keep their dtype under mixed precision, and their gradients are this rank's own.
TEST(FullyShardIgnoreParams, IgnoredParametersAreNeitherCastNorReduced) {
  each_rank(2, [](Rank world) {
    struct TwoImpl : torch::nn::Module {
      TwoImpl() : kept(register_parameter("kept", at::ones({4}))), sharded(register_parameter("sharded", at::ones({4}))) {}
      at::Tensor forward(double factor) {
        EXPECT_EQ(kept.scalar_type(), at::kFloat);
        EXPECT_EQ(sharded.scalar_type(), at::kBFloat16);
        return (kept.sum() + sharded.sum()) * factor;
      }
      at::Tensor kept, sharded;
    };
    auto two = std::make_shared<TwoImpl>();
    two->to(world->device());
    auto before = two->kept.data_ptr();
    fully_shard(two, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16}, .ignored_params = {two->kept}});
    call(*two, world->rank() + 1.0).backward();
    EXPECT_EQ(two->kept.data_ptr(), before);
    EXPECT_TRUE(at::equal(two->kept.grad(), at::full_like(two->kept, world->rank() + 1.0)));
    EXPECT_TRUE(at::equal(full_grad(two->sharded), at::full({4}, 1.5, world->device())));
  });
}

// An ignored parameter that is shared with a sharded module stays ignored wherever it shows up.
TEST(FullyShardIgnoreParams, AnIgnoredParameterMustBeIgnoredAtEveryLevel) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto a = filled(A(), *world);
    fully_shard(a->b, mesh, {.ignored_params = {a->b->subtrahend}});
    EXPECT_EQ(a->b->subtrahend.sizes(), (std::vector<int64_t>{8, 8}));
    fully_shard(a, mesh);  // says nothing of it: the root unit takes it
    EXPECT_EQ(sharding_of(a->b->subtrahend).global_sizes, (std::vector<int64_t>{8, 8}));
    a(random_input(*world, {8, 8}, 1)).backward();
    auto plain = filled(A(), *world);
    plain(random_input(*world, {8, 8}, 1)).backward();
    expect_same_parameters(*a, *plain, 1e-5, 1e-5);
  });
}

}  // namespace
}  // namespace fsdpp::test::suite
