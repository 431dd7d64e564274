#include "fsdpp/shard/sharded_param.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <gmock/gmock.h>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/world.h"

namespace fsdpp::shard {
namespace {

using Sizes = std::vector<int64_t>;

/// The metadata that a plan gives to a parameter of this shape.
ShardedParam make_param(const std::shared_ptr<comm::Mesh>& mesh, const Sizes& sizes, const PlanOptions& base = {}) {
  PlanOptions options = base;
  options.world_size = mesh->shard_size();
  ParamShape shape{sizes.empty() ? 1 : sizes[0], 1};
  for (size_t d = 1; d < sizes.size(); ++d) shape.row_numel *= sizes[d];
  const Plan plan = make_plan(std::vector<ParamShape>{shape}, options);
  ShardedParam param;
  param.name = "w";
  param.global_sizes = sizes;
  param.mesh = mesh;
  param.cut = plan.params[0].cut;
  param.row_numel = shape.row_numel;
  for (int rank = 0; rank < options.world_size; ++rank) param.ranges.push_back(plan.local_range(0, rank));
  return param;
}

PlanOptions tight() {
  PlanOptions options;
  options.param_align = options.slice_align = 1;
  options.padding_fraction = 0;
  options.padding_per_rank = 0;
  return options;
}

at::Tensor numbers(const Sizes& sizes, c10::ScalarType dtype) { return at::randint(0, 100, sizes, at::kInt).to(dtype); }

class ShardedParamTest : public ::testing::TestWithParam<int> {};

TEST_P(ShardedParamTest, FullTensorOfLocalPartsIsTheTensorAgain) {
  const std::vector<Sizes> shapes{{}, {1}, {7}, {0}, {0, 5}, {4, 0}, {13, 3}, {2, 3, 5}, {1, 1000}, {64, 64}};
  at::manual_seed(1);
  std::vector<at::Tensor> fulls;
  for (const Sizes& sizes : shapes) fulls.push_back(numbers(sizes, at::kFloat));
  comm::run_local_world(GetParam(), [&](std::shared_ptr<comm::World> world) {
    ASSERT_EQ(world->size(), GetParam());
    const auto mesh = comm::Mesh::shard(world);
    for (const PlanOptions& options : {PlanOptions{}, tight()}) {
      for (const at::Tensor& full : fulls) {
        const ShardedParam param = make_param(mesh, full.sizes().vec(), options);
        const at::Tensor local = local_part(param, full);
        EXPECT_EQ(local.sizes().vec(), param.local_sizes());
        EXPECT_EQ(local.numel(), param.local().size());
        EXPECT_TRUE(at::equal(full_tensor(param, local), full)) << full.sizes() << " " << param.placement();
      }
    }
  });
}

TEST_P(ShardedParamTest, FullTensorWorksForEveryDtype) {
  const std::vector<c10::ScalarType> dtypes{at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte,
                                            at::kShort,  at::kInt,  at::kLong,     at::kBool};
  comm::run_local_world(GetParam(), [&](std::shared_ptr<comm::World> world) {
    const auto mesh = comm::Mesh::shard(world);
    const ShardedParam param = make_param(mesh, {9, 3}, tight());
    for (const c10::ScalarType dtype : dtypes) {
      at::Tensor full = numbers({9, 3}, at::kInt);
      full.copy_(at::arange(27).view({9, 3}));
      full = full.to(dtype);
      const at::Tensor joined = full_tensor(param, local_part(param, full));
      EXPECT_EQ(joined.scalar_type(), dtype);
      EXPECT_TRUE(at::equal(joined, full)) << dtype;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShardedParamTest, ::testing::Values(1, 2, 3, 4));

TEST(ShardedParam, FullTensorSharesNoMemoryWithTheLocalShard) {
  comm::run_local_world(1, [&](std::shared_ptr<comm::World> world) {
    const ShardedParam param = make_param(comm::Mesh::shard(world), {4, 2});
    const at::Tensor local = numbers({4, 2}, at::kFloat);
    EXPECT_NE(full_tensor(param, local).data_ptr(), local.data_ptr());
    EXPECT_NE(local_part(param, local).data_ptr(), local.data_ptr());
  });
}

TEST(ShardedParam, PlacementNamesRowsOrElements) {
  comm::run_local_world(3, [&](std::shared_ptr<comm::World> world) {
    const auto mesh = comm::Mesh::shard(world);
    EXPECT_EQ(make_param(mesh, {7, 64}).placement(), "Ragged(dim=0, rows=[3,3,1])");
    const ShardedParam param = make_param(mesh, {2, 9}, tight());
    EXPECT_EQ(param.placement(), "Ragged(elements=[6,6,6])");
    EXPECT_EQ(param.local_sizes(), Sizes{6});
    EXPECT_EQ(param.numel(), 18);
  });
}

TEST(ShardedParam, WithAWrongShapeThenUsageError) {
  comm::run_local_world(2, [&](std::shared_ptr<comm::World> world) {
    const ShardedParam param = make_param(comm::Mesh::shard(world), {8, 64});
    EXPECT_THROW((void)full_tensor(param, numbers({8, 64}, at::kFloat)), UsageError);
    EXPECT_THROW((void)full_tensor(param, at::Tensor()), UsageError);
    EXPECT_THROW((void)local_part(param, numbers({4, 64}, at::kFloat)), UsageError);
  });
}

}  // namespace
}  // namespace fsdpp::shard
