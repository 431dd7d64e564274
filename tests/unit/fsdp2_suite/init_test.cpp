// After test_fully_shard_init.py: what fully_shard manages, on which meshes, and what the first forward settles. Models on the meta device
// are tested in deferred_init_test.cpp.
#include <map>
#include <set>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using Names = std::vector<std::string>;

template <class E, class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "no error";
}

Names names_of(const UnitHandle& unit) {
  Names names;
  for (auto& p : unit.parameters()) names.push_back(p.name);
  return names;
}

/// Mlps with a buffer each.
struct BufferedImpl : torch::nn::Module {
  explicit BufferedImpl(int64_t dim) {
    mlp = register_module("mlp", Mlp(dim));
    offset = register_buffer("offset", at::ones({dim}));
  }
  at::Tensor forward(const at::Tensor& x) { return mlp(x) + offset; }
  Mlp mlp{nullptr};
  at::Tensor offset;
};
FSDPP_MODULE(Buffered);

// -- device --------------------------------------------------------------------------------------------------------------

// fully_shard does not move tensors: a parameter elsewhere is an error that says so, an ignored one and buffers stay where they are.
TEST(DeviceTensor, MoveStatesToDeviceTensor) {
  each_rank(1, [](Rank world) {
    auto mesh = Mesh::shard(world);
    Buffered model(8);
    model->register_parameter("extra", at::empty({2}, at::TensorOptions(at::kMeta)));
    auto before = model->mlp->in_proj->weight.detach().clone();
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(model, mesh); }), AllOf(HasSubstr("'extra'"), HasSubstr("meta"), HasSubstr(world->device().str())));
    EXPECT_TRUE(at::equal(model->mlp->in_proj->weight.detach(), before));
    EXPECT_THAT(units(*model), IsEmpty());
  });
}

TEST(DeviceTensor, MoveStatesToDeviceIgnoredParamDevice) {
  each_rank(2, [](Rank world) {
    auto model = filled(Buffered(8), *world);
    auto extra = model->register_parameter("extra", at::empty({2}, at::TensorOptions(at::kMeta)));
    auto unit = fully_shard(model, Mesh::shard(world), {.ignored_params = {extra}});
    EXPECT_TRUE(extra.is_meta());
    EXPECT_EQ(unit.parameters().size(), 4u);
    EXPECT_EQ(model->offset.sizes(), (std::vector<int64_t>{8}));
  });
}

// -- mesh ----------------------------------------------------------------------------------------------------------------

TEST(MeshArg, InvalidMesh) {
  each_rank(3, [](Rank world) {
    EXPECT_THROW((void)Mesh::hybrid(world, 2), ConfigError);
    EXPECT_THROW((void)Mesh::hybrid(world, 0), ConfigError);
    EXPECT_THROW((void)Mesh::hybrid(world, -1), ConfigError);
    EXPECT_THROW((void)Mesh::hybrid(world, 6), ConfigError);
    Mlp mlp(8);
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(mlp, nullptr); }), HasSubstr("no mesh"));
  });
}

TEST(MeshArg, RanksOfA2dMesh) {
  each_rank(6, [](Rank world) {
    auto mesh = Mesh::hybrid(world, 2);
    EXPECT_EQ(std::pair(mesh->replicate_size(), mesh->shard_size()), std::pair(2, 3));
    EXPECT_EQ(mesh->replicate_rank(), world->rank() / 3);
    EXPECT_EQ(mesh->shard_rank(), world->rank() % 3);
    EXPECT_EQ(mesh->gather_comm().size(), 3);
    EXPECT_EQ(mesh->replicate_comm().size(), 2);
  });
}

// -- managed modules and states ------------------------------------------------------------------------------------------

TEST(ManagedModulesAndStates, ManagedStatesNestedFullyShard) {
  each_rank(1, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto stack = filled(MlpStack(8, 2), *world);
    auto inner = fully_shard(stack->mlps[0], mesh), outer = fully_shard(stack, mesh);
    EXPECT_THAT(names_of(inner), UnorderedElementsAre("in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"));
    EXPECT_THAT(names_of(outer), UnorderedElementsAre("1.in_proj.weight", "1.in_proj.bias", "1.out_proj.weight", "1.out_proj.bias"));
    EXPECT_EQ(units(*stack).size(), 2u);
    EXPECT_THROW((void)unit_of(*stack->mlps[1]), UsageError);
  });
}

TEST(ManagedModulesAndStates, ManagedModulesDuplicate) {
  each_rank(2, [](Rank world) {
    struct TwiceImpl : torch::nn::Module {
      TwiceImpl() {
        mlp = register_module("first", Mlp(8));
        register_module("second", mlp);
      }
      at::Tensor forward(const at::Tensor& x) { return mlp(mlp(x)); }
      Mlp mlp{nullptr};
    };
    auto sharded = std::make_shared<TwiceImpl>(), plain = std::make_shared<TwiceImpl>();
    for (auto& m : {sharded, plain}) fill_parameters(*m, 1), m->to(world->device());
    auto unit = fully_shard(sharded, Mesh::shard(world));
    EXPECT_EQ(unit.parameters().size(), 4u);
    for (int r = 0; r < 2; ++r) (plain->forward(random_input(*world, {2, 8}, r)).sum() / 2).backward();
    call(*sharded, random_input(*world, {2, 8}, world->rank())).sum().backward();
    expect_same_parameters(*sharded, *plain, 1e-6, 1e-6);
  });
}

TEST(ManagedModulesAndStates, ManagedStatesListOfMlps) {
  each_rank(1, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto stack = filled(MlpStack(8, 5), *world);
    auto& m = stack->mlps;
    auto three = fully_shard({m[0].ptr(), m[1].ptr(), m[2].ptr()}, mesh), root = fully_shard(stack, mesh);
    EXPECT_EQ(three.parameters().size(), 12u);
    EXPECT_EQ(root.parameters().size(), 8u);
    std::set<const void*> handles;
    for (auto& unit : {three, root})
      for (auto& p : unit.parameters()) handles.insert(p.handle.unsafeGetTensorImpl());
    EXPECT_EQ(handles.size(), 20u);
    for (int i : {0, 1, 2}) EXPECT_EQ(unit_of(*m[i]).parameters().size(), 12u);
    EXPECT_EQ(units(*stack).size(), 2u);
  });
}

TEST(ManagedModulesAndStates, EmptyListNullModuleAndRepeatedModuleAreErrors) {
  each_rank(1, [](Rank world) {
    auto mesh = Mesh::shard(world);
    Mlp mlp(8);
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{}, mesh); }), HasSubstr("empty list"));
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(std::shared_ptr<torch::nn::Module>(), mesh); }), HasSubstr("empty module"));
    EXPECT_THAT(units(*mlp), IsEmpty());
  });
}

/// A weight given from outside, so that two of these can share one.
struct MatImpl : torch::nn::Module {
  explicit MatImpl(at::Tensor weight) : w(register_parameter("w", std::move(weight))) {}
  at::Tensor forward(const at::Tensor& x) { return at::mm(x, w); }
  at::Tensor w;
};
FSDPP_MODULE(Mat);
struct MatStackImpl : torch::nn::Module {
  explicit MatStackImpl(std::vector<Mat> m) : mats(std::move(m)) {
    for (auto& mat : mats) register_module(std::to_string(children().size()), mat);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& m : mats) x = m(x);
    return x;
  }
  std::vector<Mat> mats;
};
FSDPP_MODULE(MatStack);

TEST(ManagedModulesAndStates, ManagedStatesSharedParams) {
  each_rank(2, [](Rank world) {
    auto make = [&] {
      auto w = at::eye(4).to(world->device());
      Mat a(w * 0.5), b(w), c(a->w);
      return MatStack(std::vector<Mat>{a, b, c});
    };
    auto sharded = make(), plain = make();
    auto unit = fully_shard(sharded, Mesh::shard(world));
    EXPECT_THAT(names_of(unit), UnorderedElementsAre("0.w", "1.w"));
    EXPECT_TRUE(sharded->mats[2]->w.is_same(sharded->mats[0]->w));
    auto x = at::ones({2, 4}, world->device());
    sharded(x).sum().backward(), plain(x).sum().backward();
    EXPECT_TRUE(sharded->mats[2]->w.is_same(sharded->mats[0]->w));
    expect_same_parameters(*sharded, *plain, 1e-6, 1e-6);
  });
}

// The second unit borrows the shared weight of the first.
TEST(ManagedModulesAndStates, ParamsSharedBetweenUnitsBelongToTheFirst) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    Mat a(at::eye(4).to(world->device())), b(a->w);
    auto first = fully_shard(a, mesh), second = fully_shard(b, mesh);
    EXPECT_EQ(first.parameters().size(), 1u);
    EXPECT_THAT(second.parameters(), IsEmpty());
    b(at::ones({2, 4}, world->device())).sum().backward();
    EXPECT_TRUE(at::equal(full_grad(a->w), at::full({4, 4}, 2.0, world->device())));
  });
}

// -- sharding specs ------------------------------------------------------------------------------------------------------

class ShardedParameterTensor : public ::testing::TestWithParam<std::pair<int, int>> {};  // ranks, replicas
INSTANTIATE_TEST_SUITE_P(Meshes, ShardedParameterTensor,
                         ::testing::Values(std::pair{1, 1}, std::pair{2, 1}, std::pair{3, 1}, std::pair{4, 1}, std::pair{4, 2}, std::pair{4, 4}, std::pair{6, 2}));

// Even, uneven, fewer rows than ranks, scalar, empty.
TEST_P(ShardedParameterTensor, ShardTensorParameters) {
  auto [ranks, replicas] = GetParam();
  each_rank(ranks, [replicas = replicas](Rank world) {
    auto mesh = Mesh::hybrid(world, replicas);
    const std::map<std::string, std::vector<int64_t>> shapes{{"even", {24, 3}}, {"uneven", {7, 15}}, {"few", {1, 5}}, {"scalar", {}}, {"empty", {0, 3}}, {"cube", {5, 2, 2}}};
    auto module = std::make_shared<torch::nn::Module>("shapes");
    std::map<std::string, at::Tensor> originals;
    for (auto& [name, sizes] : shapes)
      originals[name] = module->register_parameter(name, random_input(*world, sizes, sizes.size())).detach().clone();
    auto unit = fully_shard(module, mesh);
    EXPECT_EQ(unit.parameters().size(), shapes.size());
    for (auto& p : sharded_parameters(*module)) {
      SCOPED_TRACE(p.name + " " + p.placement());
      EXPECT_EQ(p.global_sizes, shapes.at(p.name));
      EXPECT_EQ(p.dtype, at::kFloat);
      EXPECT_EQ(p.mesh, mesh);
      ASSERT_EQ(p.ranges.size(), static_cast<size_t>(mesh->shard_size()));
      int64_t end = 0;
      for (auto& r : p.ranges) {
        EXPECT_EQ(r.begin, end);
        EXPECT_EQ((r.end - r.begin) % std::max<int64_t>(p.row_numel, 1), 0) << "a row is cut";
        end = r.end;
      }
      EXPECT_EQ(end, p.numel());
      EXPECT_EQ(p.handle.sizes().vec(), p.local_sizes());
      EXPECT_TRUE(at::equal(p.handle.detach(), shard::local_part(p, originals.at(p.name))));
      EXPECT_TRUE(at::equal(full_tensor(p.handle), originals.at(p.name)));
    }
  });
}

// -- lazy initialisation -------------------------------------------------------------------------------------------------

TEST(LazyInit, FullyShardIsRoot) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto stack = filled(MlpStack(8, 2), *world);
    auto first = fully_shard(stack->mlps[0], mesh), root = fully_shard(stack, mesh);  // mlp 1 is in the root unit
    auto loss = stack(random_input(*world, {2, 8}, 1)).sum();
    EXPECT_TRUE(first.is_sharded());
    EXPECT_FALSE(root.is_sharded()) << "the root keeps its parameters for backward";
    EXPECT_TRUE(root.memory().keeps_gathered);
    EXPECT_FALSE(first.memory().keeps_gathered);
    loss.backward();
    expect_sharded(*stack);
    EXPECT_EQ(first.stats().backward_gathers, 1);
    EXPECT_EQ(root.stats().backward_gathers, 0);
  });
}

TEST(LazyInit, FullyShardModuleAndParamFqns) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto stack = filled(MlpStack(8, 2), *world);
    auto inner = fully_shard(stack->mlps[1]->in_proj, mesh), middle = fully_shard(stack->mlps[1], mesh), root = fully_shard(stack, mesh);
    (void)stack(random_input(*world, {2, 8}, 1));
    EXPECT_EQ(root.name(), "");
    EXPECT_EQ(middle.name(), "1");
    EXPECT_EQ(inner.name(), "1.in_proj");
    EXPECT_THAT(names_of(inner), UnorderedElementsAre("1.in_proj.weight", "1.in_proj.bias"));
    EXPECT_THAT(names_of(middle), UnorderedElementsAre("1.out_proj.weight", "1.out_proj.bias"));
    EXPECT_THAT(names_of(root), UnorderedElementsAre("0.in_proj.weight", "0.in_proj.bias", "0.out_proj.weight", "0.out_proj.bias"));
    Names all;
    for (auto& p : sharded_parameters(*stack)) all.push_back(p.name);
    Names want;
    for (auto& p : stack->named_parameters()) want.push_back(p.key());
    EXPECT_EQ(all, want);
  });
}

// FSDP2 refuses a root that comes after one of its modules ran: here names and defaults follow the outermost.
TEST(LazyInit, FullyShardDoubleLazyInit) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto sharded = filled(MlpStack(8, 2), *world), plain = filled(MlpStack(8, 2), *world);
    for (auto& m : sharded->mlps) fully_shard(m, mesh);
    fully_shard(sharded, mesh);
    (void)sharded->mlps[0](random_input(*world, {2, 8}, 1));
    EXPECT_EQ(unit_of(*sharded->mlps[0]).name(), "");
    expect_train_parity(*world, trainee(sharded), trainee(plain), [&](int i, int r) { return random_input(*world, {2, 8}, 10 * i + r); }, {.iterations = 3});
    EXPECT_EQ(unit_of(*sharded->mlps[0]).name(), "0");
    EXPECT_EQ(unit_of(*sharded->mlps[0]).stats().backward_gathers, 3) << "no longer a root, which would keep its parameters";
  });
}

// Two modules, one unit, no module around them.
TEST(LazyInit, FullyShardMultiModuleRoot) {
  each_rank(2, [](Rank world) {
    auto sharded = filled(MlpStack(8, 2), *world), plain = filled(MlpStack(8, 2), *world);
    fully_shard({sharded->mlps[0].ptr(), sharded->mlps[1].ptr()}, Mesh::shard(world));
    expect_train_parity(*world, trainee(sharded), trainee(plain), [&](int i, int r) { return random_input(*world, {2, 8}, 10 * i + r); }, {.iterations = 3});
  });
}

// As adapters do that set themselves up from the weight: a parameter gets new data before the first forward.
TEST(LazyInit, ResetShardedParamInLazyInit) {
  each_rank(2, [](Rank world) {
    auto sharded = filled(Mlp(8), *world), plain = filled(Mlp(8), *world);
    fully_shard(sharded, Mesh::shard(world));
    sharded->in_proj->weight.set_data(sharded->in_proj->weight.detach() * 2);
    plain->in_proj->weight.set_data(plain->in_proj->weight.detach() * 2);
    expect_train_parity(*world, trainee(sharded), trainee(plain), [&](int i, int r) { return random_input(*world, {2, 8}, 10 * i + r); }, {.iterations = 3});
  });
}

// -- hybrid sharding -----------------------------------------------------------------------------------------------------

TEST(HybridInit, HsdpBroadcastAcrossReplicas) {
  each_rank(4, [](Rank world) {
    auto mesh = Mesh::hybrid(world, 2);
    auto make = [&](uint64_t seed) {
      auto model = filled(Buffered(8), *world, seed);
      at::NoGradGuard no_grad;
      model->offset.fill_(static_cast<double>(seed));
      return model;
    };
    auto model = make(1 + world->rank()), want = make(1);
    fully_shard(model->mlp->in_proj, mesh);
    fully_shard(model, mesh);
    expect_same_parameters(*model, *want, 0.0);
    EXPECT_TRUE(at::equal(model->offset, want->offset));
  });
}

// On one axis every rank is trusted to have the same, unless asked.
TEST(HybridInit, SyncFromRank0IsOffOnOneAxisUnlessAskedFor) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto want = filled(Mlp(8), *world, 1);
    for (bool asked : {false, true}) {
      auto mlp = filled(Mlp(8), *world, 1 + world->rank());
      FullyShardOptions options;
      if (asked) options.sync_from_rank0 = true;
      fully_shard(mlp, mesh, options);
      auto full = full_tensor(mlp->in_proj->weight);
      EXPECT_EQ(at::equal(full, want->in_proj->weight.detach()), asked);
    }
  });
}

// The hook sees each buffer of the unit once, reduced over all ranks, in the reduce dtype, and may change it.
TEST(HybridInit, CustomAllReduceHook) {
  for (auto [ranks, replicas] : {std::pair{1, 1}, {2, 1}, {2, 2}, {4, 2}})
    each_rank(ranks, [replicas = replicas](Rank world) {
      Mat mat(at::eye(32).to(world->device()));
      FullyShardOptions options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
      auto unit = fully_shard(mat, Mesh::hybrid(world, replicas), options);
      std::vector<double> seen;
      unit.set_all_reduce_hook([&](const at::Tensor& slice) {
        EXPECT_EQ(slice.scalar_type(), at::kFloat);
        EXPECT_EQ(slice.dim(), 1);
        seen.push_back(slice.max().item<double>());
        slice.mul_(10);
      });
      double mean = (world->size() + 1) / 2.0;
      auto x = at::ones({1, 32}, world->device());
      unit.set_requires_gradient_sync(false);
      (mat(x).sum() * (world->rank() + 1)).backward();
      EXPECT_THAT(seen, IsEmpty());
      unit.set_requires_gradient_sync(true);
      (mat(x).sum() * (world->rank() + 1)).backward();
      EXPECT_THAT(seen, ElementsAre(2 * mean));
      EXPECT_TRUE(at::equal(full_grad(mat->w), at::full({32, 32}, 20 * mean, world->device())));
      unit.set_all_reduce_hook(nullptr);
      (mat(x).sum() * (world->rank() + 1)).backward();
      EXPECT_EQ(seen.size(), 1u);
      EXPECT_TRUE(at::equal(full_grad(mat->w), at::full({32, 32}, 21 * mean, world->device())));
    });
}

}  // namespace
}  // namespace fsdpp::test::suite
