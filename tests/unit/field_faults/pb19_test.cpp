// Optimizers built before fully_shard.
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "fsdpp/base/error.h"
#include "fsdpp/optim/adamw.h"
#include "unit/field_faults/support.h"

namespace fsdpp::test {
namespace {

using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Ones : torch::nn::Module {
  explicit Ones(int64_t n) { w = register_parameter("w", at::ones({n})); }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w;
};

Storage storage_of(const at::Tensor& t) { return Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(t.storage().unsafeGetStorageImpl())); }

/// One step of an optimizer of kind O, made before or after sharding; `check(optimizer, model)` looks at what is left.
template <class O, class Options, class Check>
void step_in_either_order(const Options& options, double expected, Check&& check) {
  // Of 8 elements one rank owns all; of 512 each owns half.
  for (auto [ranks, n] : {std::pair{1, 8}, {2, 8}, {2, 512}})
    for (bool optimizer_first : {true, false})
      each_rank(ranks, [&, ranks = ranks, n = n](std::shared_ptr<World> world) {
        SCOPED_TRACE(optimizer_first ? "optimizer first" : "sharded first");
        auto m = std::make_shared<Ones>(n);
        const at::Tensor kept = m->w;  // as a user would
        const auto original = storage_of(m->w);
        std::unique_ptr<O> optimizer;
        if (optimizer_first) optimizer = std::make_unique<O>(m->parameters(), options);
        fully_shard(m, Mesh::shard(world));
        EXPECT_TRUE(original.expired()) << "the full parameter stays in memory";
        if (!optimizer_first) optimizer = std::make_unique<O>(m->parameters(), options);
        const double factor = ranks == 1 ? 1.5 : world->rank() + 1;
        for (bool set_to_none : {false, true}) {
          (call(*m) * factor).backward();
          EXPECT_TRUE(all_equal(full_grad(m->w), 1.5)) << "gradients grow";
          optimizer->zero_grad(set_to_none);
          EXPECT_EQ(m->w.grad().defined(), !set_to_none);
          if (m->w.grad().defined()) {
            EXPECT_TRUE(at::equal(m->w.grad(), at::zeros_like(m->w.grad())));
          }
        }
        (call(*m) * factor).backward();
        optimizer->step();
        EXPECT_TRUE(all_near(full_tensor(m->w), expected));
        EXPECT_TRUE(kept.is_same(m->w));
        EXPECT_EQ(kept.sizes(), sharding_of(m->w).local_sizes());
        EXPECT_EQ(kept.numel(), n == 512 ? 256 : kept.numel());
        check(*optimizer, *m);
        EXPECT_TRUE(nothing_unsharded(*m));
      });
}

TEST(OptimizerBeforeSharding, PB19_SgdThenUpdatesTheShardedParameter) {
  step_in_either_order<torch::optim::SGD>(torch::optim::SGDOptions(0.1), 0.85, [](auto&, auto&) {});
}

TEST(OptimizerBeforeSharding, PB19_AdamThenItsMomentsHaveTheLocalShardsSize) {
  step_in_either_order<torch::optim::Adam>(torch::optim::AdamOptions(0.1), 0.9, [](torch::optim::Adam& adam, Ones& m) {
    ASSERT_EQ(adam.state().size(), 1U);
    auto& state = static_cast<torch::optim::AdamParamState&>(*adam.state().at(m.w.unsafeGetTensorImpl()));
    for (const auto& moment : {state.exp_avg(), state.exp_avg_sq()}) {
      EXPECT_EQ(moment.sizes(), sharding_of(m.w).local_sizes());
      EXPECT_EQ(moment.scalar_type(), at::kFloat);
    }
  });
}

}  // namespace
}  // namespace fsdpp::test
