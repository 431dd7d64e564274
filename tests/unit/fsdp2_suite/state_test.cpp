// After test_fully_shard_state.py, test_fully_shard_logging.py, test_fully_shard_unsharded_views.py and the parts of
// test_fully_shard_grad_dtype.py that have a meaning here.
#include <torch/nn/modules/container/modulelist.h>
#include <torch/optim/sgd.h>

#include <set>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

template <class F>
std::string usage_error_of(F f) {
  try {
    f();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "no error";
}

// -- state ---------------------------------------------------------------------------------------------------------------

TEST(FullyShardState, EachCallMakesAStateOfItsOwn) {
  each_rank(1, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto stack = filled(MlpStack(8, 3), *world);
    for (auto& m : stack->mlps) fully_shard(m, mesh);
    fully_shard(stack, mesh);
    EXPECT_EQ(units(*stack).size(), 4u);
    unit_of(*stack->mlps[1]).unshard();
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(unit_of(*stack->mlps[i]).is_sharded(), i != 1);
    EXPECT_TRUE(unit_of(*stack).is_sharded());
  });
}

TEST(FullyShardState, FullyShardReapply) {
  for (int ranks : {1, 2, 3})
    each_rank(ranks, [](Rank world) {
      auto mesh = Mesh::shard(world);
      auto stack = filled(MlpStack(8, 2), *world);
      for (auto& m : stack->mlps) fully_shard(m, mesh);
      EXPECT_THAT(usage_error_of([&] { fully_shard(stack->mlps[0], mesh); }), AllOf(HasSubstr("twice"), HasSubstr("Mlp")));
      EXPECT_THAT(usage_error_of([&] { fully_shard({stack.ptr(), stack->mlps[1].ptr()}, mesh); }), HasSubstr("twice"));
      EXPECT_EQ(units(*stack).size(), 2u) << "the refused calls changed nothing";
      EXPECT_EQ(unit_of(*stack->mlps[0]).parameters().size(), 4u);
    });
}

// What Python sees as the class swap: only the module given is a unit, and it stays what it was.
TEST(FullyShardState, FullyShardCls) {
  each_rank(2, [](Rank world) {
    auto stack = filled(MlpStack(8, 2), *world);
    auto before = stack.ptr();
    fully_shard(stack, Mesh::shard(world));
    EXPECT_EQ(stack.ptr(), before);
    (void)unit_of(*stack);
    for (auto& m : stack->modules(/*include_self=*/false)) EXPECT_THROW((void)unit_of(*m), UsageError);
  });
}

// A holder is a reference: its copy is the same module in the same unit.
TEST(FullyShardState, ACopyOfAHolderIsTheSameUnit) {
  each_rank(2, [](Rank world) {
    Mlp mlp = filled(Mlp(8), *world), plain = filled(Mlp(8), *world);
    fully_shard(mlp, Mesh::shard(world));
    Mlp copy = mlp;
    auto x = random_input(*world, {2, 8}, 1);
    copy(x).sum().backward(), plain(x).sum().backward();
    expect_same_parameters(*mlp, *plain, 1e-6, 1e-6);
    EXPECT_EQ(unit_of(*mlp).stats().gathers, 1);
    mlp = Mlp(nullptr);
    EXPECT_EQ(unit_of(*copy).parameters().size(), 4u);
  });
}

// FSDP2 refuses to be deep-copied. LibTorch's clone() copies what the handles show: this rank's shards, in a module of no unit.
TEST(FullyShardState, FullyShardDeepcopy) {
  each_rank(2, [](Rank world) {
    Hooked<torch::nn::Linear> linear = filled(Hooked<torch::nn::Linear>(3, 5), *world), plain = filled(Hooked<torch::nn::Linear>(3, 5), *world);
    fully_shard(linear, Mesh::shard(world));
    auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(linear->clone());
    EXPECT_THROW((void)unit_of(*copy), UsageError);
    EXPECT_THROW((void)sharding_of(copy->weight), UsageError);
    EXPECT_EQ(copy->weight.sizes(), linear->weight.sizes());
    {
      at::NoGradGuard no_grad;
      copy->weight.fill_(7), copy->bias.fill_(7);
    }
    expect_same_parameters(*linear, *plain, 0.0);
    linear(random_input(*world, {2, 3}, 1)).sum().backward();
    EXPECT_FALSE(copy->weight.grad().defined());
  });
}

// A container without a forward of its own is a unit like others, gathered for code around its modules.
TEST(FullyShardState, AContainerWithoutForwardIsCalledAs) {
  each_rank(2, [](Rank world) {
    auto make = [&] {
      torch::nn::ModuleList list;
      for (int i = 0; i < 2; ++i) list->push_back(Mlp(8).ptr());
      return filled(list, *world);
    };
    auto sharded = make(), plain = make();
    auto run = [](torch::nn::ModuleList& list, const at::Tensor& x) { return list->at<MlpImpl>(1).forward(list->at<MlpImpl>(0).forward(x)); };
    fully_shard(sharded, Mesh::shard(world));
    auto x = random_input(*world, {2, 8}, 1);
    call_as(*sharded, [&](const at::Tensor& y) { return run(sharded, y); }, x).sum().backward();
    run(plain, x).sum().backward();
    expect_same_parameters(*sharded, *plain, 1e-6, 1e-6);
  });
}

// -- logging -------------------------------------------------------------------------------------------------------------

TEST(Logging, FsdpLogging) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto stack = filled(MlpStack(4, 2), *world);
    for (auto& m : stack->mlps) fully_shard(m, mesh);
    fully_shard(stack, mesh);
    stack(random_input(*world, {4, 4}, 0)).sum().backward();
    for (auto& u : units(*stack)) EXPECT_TRUE(u.is_sharded());
    EventLog log(EventLog::What::Hooks, *world);
    auto hooks = [&] {
      auto all = log.take();
      std::erase_if(all, [](auto& e) { return e[0] != '+' || !(e.starts_with("+Pre") || e.starts_with("+Post")); });
      return all;
    };
    auto loss = stack(random_input(*world, {4, 4}, 0)).sum();
    EXPECT_THAT(hooks(), ElementsAre("+PreForward", "+PreForward 0", "+PostForward 0", "+PreForward 1", "+PostForward 1", "+PostForward"));
    loss.backward();
    EXPECT_THAT(hooks(), ElementsAre("+PreBackward 1", "+PreBackward", "+PostBackward 1", "+PreBackward 0", "+PostBackward 0"));
  });
}

// Megatron-FSDP v2's emit_stacked_nvtx_ranges: every range that begins ends, and they nest.
TEST(Logging, EmitStackedNvtxRanges) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto stack = filled(MlpStack(4, 3), *world);
    for (auto& m : stack->mlps) fully_shard(m, mesh);
    fully_shard(stack, mesh);
    EventLog log(EventLog::What::Hooks, *world);
    for (int step = 0; step < 2; ++step) stack(random_input(*world, {4, 4}, 0)).sum().backward();
    std::vector<std::string> open;
    size_t deepest = 0;
    for (auto& e : log.take()) {
      if (e[0] == '+') {
        open.push_back(e.substr(1));
        deepest = std::max(deepest, open.size());
        continue;
      }
      ASSERT_FALSE(open.empty());
      EXPECT_EQ(open.back(), e.substr(1));
      open.pop_back();
    }
    EXPECT_THAT(open, IsEmpty());
    EXPECT_GE(deepest, 2u);
  });
}

// -- views of unsharded parameters ---------------------------------------------------------------------------------------

// On one rank with one dtype the gathered parameter is the shard itself: no memory, no copy, and what is written to the shard is seen.
TEST(UnshardedViews, ViewsSurviveReshardAndWeightLoading) {
  for (bool reshard : {false, true})
    each_rank(1, [&](Rank world) {
      Hooked<torch::nn::Linear> linear(8, 4);
      linear->to(world->device());
      auto unit = fully_shard(linear, Mesh::shard(world), {.reshard_after_forward = reshard});
      at::NoGradGuard no_grad;
      const void* shard = linear->weight.data_ptr();
      auto x = at::ones({2, 8}, world->device());
      for (int version = 1; version < 4; ++version) {
        linear->weight.fill_(version), linear->bias.fill_(version);
        EXPECT_TRUE(at::equal(linear(x), at::full({2, 4}, 9.0 * version, world->device())));
        unit.unshard();
        EXPECT_EQ(linear->weight.data_ptr(), shard);
        unit.reshard();
        EXPECT_EQ(linear->weight.data_ptr(), shard);
      }
      EXPECT_EQ(unit.memory().gathered_bytes, 0);
      EXPECT_EQ(reserved_buffer_bytes(*linear), 0);
    });
}

TEST(UnshardedViews, TrainingAndCastsKeepIndependentStorage) {
  each_rank(1, [](Rank world) {
    Hooked<torch::nn::Linear> linear(8, 4);
    linear->to(world->device());
    auto unit = fully_shard(linear, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16}});
    const void* shard = linear->weight.data_ptr();
    unit.unshard();
    EXPECT_NE(linear->weight.data_ptr(), shard);
    EXPECT_EQ(linear->weight.scalar_type(), at::kBFloat16);
    unit.reshard();
    EXPECT_EQ(linear->weight.data_ptr(), shard);
    EXPECT_EQ(linear->weight.scalar_type(), at::kFloat);
  });
}

// Loading by assignment gives a parameter new memory: its values count, and the unit's own memory is used again.
TEST(UnshardedViews, ReplacedStorageRecreatesView) {
  for (int ranks : {1, 2})
    each_rank(ranks, [](Rank world) {
      Hooked<torch::nn::Linear> linear(8, 4);
      linear->to(world->device());
      fully_shard(linear, Mesh::shard(world), {.reshard_after_forward = false});
      at::NoGradGuard no_grad;
      auto x = at::ones({2, 8}, world->device());
      (void)linear(x);
      const void* shard = linear->weight.data_ptr();
      for (auto& p : linear->parameters()) p.set_data(at::full_like(p, 2.0));
      EXPECT_TRUE(at::equal(linear(x), at::full({2, 4}, 18.0, world->device())));
      unit_of(*linear).reshard();
      EXPECT_EQ(linear->weight.data_ptr(), shard);
      EXPECT_TRUE(at::equal(full_tensor(linear->weight), at::full({4, 8}, 2.0, world->device())));
    });
}

// -- gradient dtype ------------------------------------------------------------------------------------------------------

// The sharded gradient has the dtype of the shard; sums of micro-batches are kept in the reduce dtype before.
TEST(GradDtype, DefaultGradientDtype) {
  for (auto storage : {at::kFloat, at::kBFloat16})
    for (bool sync_each : {true, false})
      each_rank(2, [&](Rank world) {
        Hooked<torch::nn::Linear> linear(torch::nn::LinearOptions(8, 4).bias(false));
        linear->to(world->device(), storage);
        auto unit = fully_shard(linear, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
        auto x = at::full({1, 8}, 1.0078125, at::TensorOptions(world->device()).dtype(at::kBFloat16));
        for (int k = 0; k < 3; ++k) {
          unit.set_requires_gradient_sync(sync_each || k == 2);
          linear(x).sum().backward();
        }
        auto grad = linear->weight.grad();
        EXPECT_EQ(grad.scalar_type(), storage);
        // 3 · 1.0078125 = 3.0234375 needs 9 bits of fraction: bf16 has 7 and rounds to 3.03125, or sums to it.
        double want = storage == at::kFloat ? 3.0234375 : 3.03125;
        EXPECT_TRUE(at::equal(grad.to(at::kDouble), at::full(grad.sizes(), want, grad.options().dtype(at::kDouble))));
      });
}

}  // namespace
}  // namespace fsdpp::test::suite
