// test_fully_shard_training.py but for parity, grouped forwards and accumulation: what handles show, odd forwards, roots.
#include <algorithm>
#include <set>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

class FullyShardTraining : public ::testing::TestWithParam<int> {
 protected:
  static int size() { return GetParam(); }
  static std::vector<Reshard> reshards() {
    std::vector<Reshard> all = {std::nullopt, true, false};
    if (size() % 2 == 0) all.push_back(2);
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, FullyShardTraining, ::testing::Values(1, 2, 3, 4));

// -- forward inputs ------------------------------------------------------------------------------------------------------

struct SquareImpl : torch::nn::Module {
  SquareImpl() { w = register_parameter("w", at::arange(16).to(at::kFloat).view({4, 4})); }
  at::Tensor forward() { return at::mm(w, w); }
  at::Tensor w;
};
FSDPP_MODULE(Square);

TEST_P(FullyShardTraining, RootNoForwardInputs) {
  each_rank(size(), [](Rank world) {
    Square sharded, plain;
    fully_shard(sharded, Mesh::shard(world));
    auto out = sharded();
    EXPECT_TRUE(at::equal(out.detach(), plain().detach()));
    out.sum().backward(), plain().sum().backward();
    expect_same_parameters(*sharded, *plain, 0, 0);
  });
}

// -- what handles show ---------------------------------------------------------------------------------------------------

struct TwoUnits {
  explicit TwoUnits(const World& world) : net(filled(MlpStack(3, 2), world)), plain(filled(MlpStack(3, 2), world)) {}
  MlpStack net, plain;
};

TEST_P(FullyShardTraining, ParamRegistrationAfterForward) {
  for (auto reshard : reshards())
    each_rank(size(), [&](Rank world) {
      TwoUnits t(*world);
      FullyShardOptions options{.reshard_after_forward = reshard};
      auto mesh = Mesh::shard(world);
      auto inner = fully_shard(t.net->mlps[0]->in_proj, mesh, options), root = fully_shard(t.net, mesh, options);
      expect_handles_show_shards(*t.net);
      auto out = t.net(random_input(*world, {2, 3}, 1));
      // Memory: kept by false, and by the root when unset. Handles show shards in any case: no optimizer meets the gathered copy.
      bool kept = reshard && reshard->group() == 1;
      EXPECT_EQ(inner.is_sharded(), !kept);
      EXPECT_EQ(root.is_sharded(), !(kept || !reshard));
      expect_handles_show_shards(*t.net);
      expect_same_parameters(*t.net, *t.plain, 0);
      inner.reshard(), root.reshard();
      expect_sharded(*t.net);
      expect_handles_show_shards(*t.net);
      expect_same_parameters(*t.net, *t.plain, 0);
    });
}

TEST_P(FullyShardTraining, ParamRegistrationAfterBackward) {
  for (auto reshard : reshards())
    each_rank(size(), [&](Rank world) {
      TwoUnits t(*world);
      FullyShardOptions options{.reshard_after_forward = reshard};
      auto mesh = Mesh::shard(world);
      fully_shard(t.net->mlps[0]->in_proj, mesh, options), fully_shard(t.net, mesh, options);
      for (int i = 0; i < 2; ++i) {
        t.net(random_input(*world, {2, 3}, 1)).sum().backward();
        expect_sharded(*t.net);
        expect_handles_show_shards(*t.net);
        for (auto& p : sharded_parameters(*t.net)) EXPECT_EQ(p.handle.grad().sizes(), p.handle.sizes()) << p.name;
      }
      expect_same_parameters(*t.net, *t.plain, 0);
    });
}

// Inside forward the handles show whole, contiguous parameters; between steps contiguous parts of them.
struct WatchedImpl : torch::nn::Module {
  WatchedImpl() { weight = register_parameter("weight", at::arange(20).to(at::kFloat).view({5, 4}).t()); }  // not contiguous
  at::Tensor forward(const at::Tensor& x) {
    EXPECT_EQ(weight.sizes(), (std::vector<int64_t>{4, 5}));
    EXPECT_TRUE(weight.is_contiguous());
    return at::mm(x, weight);
  }
  at::Tensor weight;
};
FSDPP_MODULE(Watched);

TEST_P(FullyShardTraining, ContiguousParamsGrads) {
  each_rank(size(), [](Rank world) {
    Watched net;
    auto whole = net->weight.detach().clone();
    ASSERT_FALSE(net->weight.is_contiguous());
    fully_shard(net, Mesh::shard(world));
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(net->weight.is_contiguous());
      net(at::ones({2, 4})).sum().backward();
      EXPECT_TRUE(net->weight.is_contiguous());
      EXPECT_TRUE(net->weight.grad().is_contiguous());
    }
    EXPECT_TRUE(at::equal(full_tensor(net->weight), whole));
    EXPECT_TRUE(at::equal(full_grad(net->weight), at::full({4, 5}, 4.0f)));
  });
}

void float64_training(const Rank& world, bool converts_after) {
  auto sharded = filled(Mlp(4), *world), plain = filled_float64(Mlp(4), *world);
  if (!converts_after) sharded->to(at::kDouble);
  auto mesh = Mesh::shard(world);
  fully_shard(sharded->in_proj, mesh), fully_shard(sharded->out_proj, mesh), fully_shard(sharded, mesh);
  if (converts_after) sharded->to(at::kDouble);
  auto parity = float64_parity();
  parity.after_backwards = [&] {
    for (auto& p : sharded->parameters()) EXPECT_TRUE(p.scalar_type() == at::kDouble && p.grad().scalar_type() == at::kDouble);
  };
  expect_train_parity(*world, trainee(sharded), trainee(plain), random_inputs(world, {2, 4}, at::kDouble), parity);
  for (auto& p : sharded_parameters(*sharded)) EXPECT_EQ(p.dtype, at::kDouble) << p.name;
}

TEST_P(FullyShardTraining, ToFloat64BeforeInit) { each_rank(size(), [](Rank world) { float64_training(world, false); }); }
TEST_P(FullyShardTraining, ToFloat64AfterInit) { each_rank(size(), [](Rank world) { float64_training(world, true); }); }

// -- units made and dropped layer by layer -------------------------------------------------------------------------------

struct GrowingImpl : torch::nn::Module {
  void add(TinyBlock block) { blocks.push_back(register_module("b" + std::to_string(blocks.size()), std::move(block))); }
  at::Tensor forward(at::Tensor x) {
    for (auto& b : blocks) x = b(x);
    return x;
  }
  std::vector<TinyBlock> blocks;
};
FSDPP_MODULE(Growing);

TEST_P(FullyShardTraining, LayerByLayerShardNoFalsePositive) {
  each_rank(size(), [](Rank world) {
    auto mesh = Mesh::shard(world);
    Growing sharded, plain;
    for (uint64_t i = 0; i < 8; ++i) {
      {
        TinyBlock dropped(7);  // its addresses are free for the next block
        fully_shard(dropped, mesh);
      }
      TinyBlock block(7);
      fill_parameters(*block, i);
      fully_shard(block, mesh);
      sharded->add(block);
      plain->add(TinyBlock(7));
      fill_parameters(*plain->blocks.back(), i);
    }
    fully_shard(sharded, mesh);
    sharded->to(at::kDouble), plain->to(at::kDouble);
    expect_train_parity(*world, trainee(sharded), trainee(plain), random_inputs(world, {2, 7}, at::kDouble), float64_parity());
  });
}

// -- other forward methods -----------------------------------------------------------------------------------------------

struct VisionImpl : torch::nn::Module {
  VisionImpl() { proj = register_module("proj", torch::nn::Linear(12, 10)); }
  at::Tensor features(const at::Tensor& image) { return proj(image.unflatten(1, {-1, 12})); }
  at::Tensor forward(const at::Tensor& image) { return features(image).sum(1); }
  torch::nn::Linear proj{nullptr};
};
FSDPP_MODULE(Vision);

struct CaptionerImpl : torch::nn::Module {
  CaptionerImpl() {
    vision = register_module("vision", Vision());
    projector = register_module("projector", torch::nn::Linear(10, 6));
  }
  at::Tensor forward(const at::Tensor& image) {  // by `features`, which is not `forward`
    return projector(call_as(*vision, [&](const at::Tensor& x) { return vision->features(x); }, image));
  }
  Vision vision{nullptr};
  Hooked<torch::nn::Linear> projector{nullptr};
};
FSDPP_MODULE(Captioner);

TEST_P(FullyShardTraining, RegisterFsdpForwardMethod) {
  each_rank(size(), [](Rank world) {
    auto sharded = filled_float64(Captioner(), *world), plain = filled_float64(Captioner(), *world);
    auto mesh = Mesh::shard(world);
    auto vision = fully_shard(sharded->vision, mesh);
    fully_shard(sharded->projector, mesh), fully_shard(sharded, mesh);
    auto inputs = random_inputs(world, {4, 48}, at::kDouble);
    expect_train_parity(*world, trainee(sharded), trainee(plain), inputs, float64_parity());
    EXPECT_EQ(vision.stats().forward_gathers, 10);
    EXPECT_EQ(vision.stats().reduces, 10);
    EXPECT_THROW((void)sharded->vision->features(inputs(0, 0)), UsageError) << "past the unit";
  });
}

// -- several roots -------------------------------------------------------------------------------------------------------

// The names of the communicators that this rank used.
class CommNames final : public trace::Listener {
 public:
  CommNames() { trace::set_listener(this, /*for_this_thread=*/true); }
  ~CommNames() override { trace::set_listener(nullptr, /*for_this_thread=*/true); }
  void begin(const trace::Event&) noexcept override {}
  void end(const trace::Event&) noexcept override {}
  void begin(const trace::CollectiveEvent& e) noexcept override { names.emplace(e.comm); }
  std::set<std::string> names;
};

// Units of one mesh share streams, memory and communicators without being asked to, whatever their roots.
TEST_P(FullyShardTraining, ShareCommContext) {
  each_rank(size(), [](Rank world) {
    auto sharded = filled_float64(MlpStack(8, 3), *world), plain = filled_float64(MlpStack(8, 3), *world);
    auto mesh = Mesh::shard(world);
    for (auto& m : sharded->mlps) fully_shard(m, mesh);  // no unit around them: each is a root
    auto inputs = random_inputs(world, {4, 8}, at::kDouble);
    Trainee several{sharded.ptr(), [sharded](const at::Tensor& x, int) mutable { return sharded->forward(x).sum(); }};
    std::set<std::string> comms;
    {
      CommNames used;
      expect_train_parity(*world, several, trainee(plain), inputs, float64_parity());
      comms = used.names;
    }
    EXPECT_EQ(comms, world->size() == 1 ? std::set<std::string>{} : (std::set<std::string>{"default.gather", "default.reduce"}));
    int64_t one_unit = unit_of(*sharded->mlps[0]).memory().gradient_bytes;
    EXPECT_LE(reserved_buffer_bytes(*sharded), (3 + 2) * one_unit) << "gathered buffers are the roots', gradient slots shared";
    EXPECT_EQ(total_stats(*sharded).reduces, 30);
    EXPECT_EQ(total_stats(*sharded).backward_gathers, 0) << "a root keeps its parameters";
  });
}

TEST(FullyShardWorldSize1, TrainParitySingleWorldsize1) {
  for (std::array<int64_t, 3> dims : {std::array<int64_t, 3>{16, 15, 8}, {7, 15, 3}, {16, 17, 8}})
    each_rank(1, [&](Rank world) {
      auto make = [&] { return filled(Mlp(dims[0], dims[1], dims[2]), *world); };
      auto sharded = make(), plain = make();
      fully_shard(sharded, Mesh::shard(world));
      int calls = 0;
      world->watch = [&](const WireCall&) { ++calls; };
      EventLog log(EventLog::What::Collectives);
      ParityOptions parity;
      parity.tolerance = 0;  // bit for bit
      parity.after_step = [&] { EXPECT_THAT(log.take(), ::testing::IsEmpty()); };
      expect_train_parity(*world, trainee(sharded), trainee(plain), random_inputs(world, {4, dims[0]}), parity);
      EXPECT_EQ(calls, 0) << "not even a collective of one rank";
    });
}

}  // namespace
}  // namespace fsdpp::test::suite
