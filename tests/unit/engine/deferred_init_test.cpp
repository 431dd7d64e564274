// Models built without memory and sharded: no layout changes a bit of their weights.
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <optional>

#include "fsdpp/optim/adamw.h"
#include "unit/engine/deferred_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;

struct Zoo : torch::nn::Module {
  Zoo() {
    linear = register_module("linear", torch::nn::Linear(8, 5));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)));
    embedding = register_module("embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 4).padding_idx(2)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    batch = register_module("batch", torch::nn::BatchNorm1d(6));
    lstm = register_module("lstm", torch::nn::LSTM(4, 3));
    scalar = register_parameter("scalar", at::scalar_tensor(2.5));
    none = register_parameter("none", at::zeros({0, 3}));
    narrow = register_parameter("narrow", torch::nn::init::xavier_normal_(at::empty({40, 30}, at::kBFloat16)));
    wide = register_parameter("wide", at::randn({33, 3}, at::kDouble) * 0.5 + 3);
    frozen = register_parameter("frozen", at::rand({7}, at::kHalf), false);
    positions = register_buffer("positions", at::arange(6));
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::BatchNorm1d batch{nullptr};
  torch::nn::LSTM lstm{nullptr};
  at::Tensor scalar, none, narrow, wide, frozen, positions;
};

std::shared_ptr<Zoo> late_zoo() {
  return deferred([] { return std::make_shared<Zoo>(); });
}

std::map<std::string, at::Tensor> plain_zoo(uint64_t seed) {
  auto zoo = late_zoo();
  materialize(*zoo, {.seed = seed});
  return state_of(*zoo);
}

TEST(DeferredInit, StockModulesHaveTheirDistributions) {
  Zoo eager;
  auto zoo = late_zoo();
  for (auto& p : zoo->parameters()) EXPECT_TRUE(p.is_meta());
  for (auto& b : zoo->buffers()) EXPECT_TRUE(b.is_meta());
  materialize(*zoo, {.seed = 1});
  const auto got = state_of(*zoo), want = state_of(eager);
  ASSERT_EQ(got.size(), want.size());
  for (auto& [name, tensor] : want) {
    EXPECT_EQ(got.at(name).sizes(), tensor.sizes()) << name;
    EXPECT_EQ(got.at(name).scalar_type(), tensor.scalar_type()) << name;
  }
  for (auto name : {"norm.weight", "norm.bias", "batch.weight", "batch.bias", "batch.running_mean", "batch.running_var",
                    "batch.num_batches_tracked", "scalar", "none", "positions"})
    EXPECT_TRUE(at::equal(got.at(name), want.at(name))) << name;
  auto within = [&](const std::string& name, double low, double high) {
    const auto t = got.at(name).to(at::kDouble);
    EXPECT_GE(t.min().item<double>(), low) << name;
    EXPECT_LE(t.max().item<double>(), high) << name;
    EXPECT_GT(t.max().item<double>() - t.min().item<double>(), (high - low) / 2) << name;
  };
  within("linear.weight", -1 / std::sqrt(8.0), 1 / std::sqrt(8.0));
  within("conv.weight", -1 / std::sqrt(27.0), 1 / std::sqrt(27.0));
  within("lstm.weight_ih_l0", -1 / std::sqrt(3.0), 1 / std::sqrt(3.0));
  within("frozen", 0, 1);
  EXPECT_TRUE(at::equal(got.at("embedding.weight")[2], at::zeros({4})));
  EXPECT_EQ((got.at("embedding.weight") == 0).sum().item<int64_t>(), 4);
  EXPECT_NEAR(got.at("narrow").to(at::kDouble).std().item<double>(), std::sqrt(2.0 / 70), 0.01);
  EXPECT_NEAR(got.at("wide").mean().item<double>(), 3, 0.2);
  EXPECT_NEAR(got.at("wide").std().item<double>(), 0.5, 0.1);
}

TEST(DeferredInit, SeedAndNameDecideTheValues) {
  expect_same(plain_zoo(1), plain_zoo(1), "same seed: ");
  const auto a = plain_zoo(1), b = plain_zoo(2);
  EXPECT_FALSE(at::equal(a.at("linear.weight"), b.at("linear.weight")));
  EXPECT_FALSE(at::equal(a.at("lstm.weight_hh_l0").flatten().narrow(0, 0, 36), a.at("lstm.weight_ih_l0").flatten().narrow(0, 0, 36)));
  auto one = deferred([] { return torch::nn::Linear(8, 5); });
  materialize(*one, {.seed = 1});
  EXPECT_FALSE(at::equal(one->weight.detach(), a.at("linear.weight"))) << "the name is another";
}

TEST(DeferredInit, EveryWorldSizeGivesTheUnshardedBits) {
  const auto want = plain_zoo(11);
  for (int size : {1, 2, 3, 4})
    run_local_world(size, [&](std::shared_ptr<World> world) {
      auto mesh = Mesh::shard(world);
      auto zoo = late_zoo();
      fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{zoo->linear.ptr(), zoo->embedding.ptr()}, mesh);
      fully_shard(zoo, mesh);
      for (auto& p : zoo->parameters()) EXPECT_TRUE(p.is_meta());
      const auto handles = zoo->parameters();
      materialize(*zoo, {.seed = 11});
      for (auto& p : handles) EXPECT_TRUE(p.is_cpu());
      expect_same(state_of(*zoo), want, std::to_string(size) + " ranks: ");
    });
}

TEST(DeferredInit, HybridMeshesGiveTheUnshardedBits) {
  const auto want = plain_zoo(12);
  for (auto [size, replicas] : {std::pair{2, 2}, {4, 2}, {3, 3}})
    run_local_world(size, [&](std::shared_ptr<World> world) {
      auto zoo = late_zoo();
      fully_shard(zoo, Mesh::hybrid(world, replicas));
      materialize(*zoo, {.seed = 12});
      expect_same(state_of(*zoo), want, "hybrid: ");
    });
}

TEST(DeferredInit, RanksWithoutRowsAndCutsInsideRowsGiveTheUnshardedBits) {
  struct Wide : torch::nn::Module {
    Wide() {
      row = register_parameter("row", at::randn({1, 50000}));
      few = register_parameter("few", at::randn({2, 3}));
    }
    at::Tensor row, few;
  };
  auto make = [] { return deferred([] { return std::make_shared<Wide>(); }); };
  auto plain = make();
  materialize(*plain);
  run_local_world(4, [&](std::shared_ptr<World> world) {
    auto wide = make();
    fully_shard(wide, Mesh::shard(world));
    EXPECT_EQ(sharding_of(wide->row).cut, shard::Cut::Elements);
    materialize(*wide);
    expect_same(state_of(*wide), state_of(*plain), "");
  });
}

// -- sharded models ------------------------------------------------------------------------------------------------------

TEST(DeferredInit, TrainsLikeAModelWithTheSameWeights) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    auto net = late_net();
    shard_tiny_net(net, mesh);
    materialize(*net, {.seed = 3});
    auto plain = late_net();
    materialize(*plain, {.seed = 3});
    for (int step = 0; step < 2; ++step) {
      const auto ids = tokens(static_cast<uint64_t>(step));
      token_loss(net(ids), ids).backward();
      token_loss(plain(ids), ids).backward();
      at::NoGradGuard no_grad;
      for (auto* m : {&net, &plain})
        for (auto& p : (*m)->parameters()) p.add_(p.grad(), -0.5), p.mutable_grad() = at::Tensor();
    }
    const auto got = state_of(*net), want = state_of(*plain);
    for (auto& [name, tensor] : want) EXPECT_LT(relative_error(got.at(name), tensor), 1e-6) << name;
  });
}

TEST(DeferredInit, OptimizersMadeBeforeStayRight) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    auto train = [&](bool early, bool stock) {
      auto net = late_net();
      std::optional<optim::AdamW> ours;
      std::optional<torch::optim::AdamW> theirs;
      auto make = [&] { stock ? (void)theirs.emplace(net->parameters(), torch::optim::AdamWOptions(0.1)) : (void)ours.emplace(*net, optim::AdamWOptions{.lr = 0.1}); };
      shard_tiny_net(net, mesh);
      if (early) make();
      materialize(*net, {.seed = 3});
      if (!early) make();
      for (int step = 0; step < 2; ++step) {
        token_loss(net(tokens(1)), tokens(1)).backward();
        stock ? (void)theirs->step() : (void)ours->step();
        for (auto& p : net->parameters()) p.mutable_grad() = at::Tensor();
      }
      return state_of(*net);
    };
    for (bool stock : {false, true}) expect_same(train(true, stock), train(false, stock), stock ? "torch::optim " : "fsdpp::optim ");
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embed = register_module("embed", torch::nn::Embedding(11, 4));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 11).bias(false)));
    head->weight = head->register_parameter("weight2", embed->weight);
  }
  torch::nn::Embedding embed{nullptr};
  torch::nn::Linear head{nullptr};
};

TEST(DeferredInit, TiedParametersStayTied) {
  auto make = [] { return deferred([] { return std::make_shared<TiedImpl>(); }); };
  auto plain = make();
  materialize(*plain);
  EXPECT_TRUE(plain->head->weight.is_same(plain->embed->weight));
  run_local_world(3, [&](std::shared_ptr<World> world) {
    auto tied = make();
    fully_shard(tied, Mesh::shard(world));
    materialize(*tied);
    EXPECT_TRUE(tied->head->weight.is_same(tied->embed->weight));
    EXPECT_TRUE(at::equal(full_tensor(tied->embed->weight), plain->embed->weight.detach()));
  });
}

TEST(DeferredInit, ParametersOutsideTheUnitsAreMaterialisedWhole) {
  const auto want = plain_zoo(5);
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto zoo = late_zoo();
    fully_shard(zoo->linear, Mesh::shard(world));
    materialize(*zoo, {.seed = 5});
    EXPECT_EQ(zoo->conv->weight.sizes(), (std::vector<int64_t>{4, 3, 3, 3}));
    expect_same(state_of(*zoo), want, "");
  });
}

TEST(DeferredInit, InitFunctionIsAskedFirstAndSeesTheLocalRows) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto net = late_net();
    shard_tiny_net(net, Mesh::shard(world));
    std::vector<std::string> asked;
    materialize(*net, {.seed = 4, .init = [&](const std::string& name, InitTarget& target) {
                         asked.push_back(name);
                         EXPECT_EQ(target.name, name);
                         EXPECT_EQ(target.local.numel(), target.elements.size());
                         if (name == "head.weight") {
                           EXPECT_EQ(target.global_sizes, (std::vector<int64_t>{23, 7}));
                           target.normal(1, 2);
                         } else if (name == "embed.weight") {
                           target.uniform(-3, 3);
                         } else if (name == "block0.up.bias") {
                           target.constant(0.1);
                         } else if (name == "block1.up.bias") {
                           target.local.copy_(at::arange(target.elements.begin, target.elements.end));
                         } else {
                           return false;
                         }
                         return true;
                       }});
    EXPECT_EQ(asked.size(), net->parameters().size());
    EXPECT_TRUE(at::equal(full_tensor(net->blocks[0]->up->bias), at::full({15}, 0.1)));
    EXPECT_TRUE(at::equal(full_tensor(net->blocks[1]->up->bias), at::arange(15).to(at::kFloat)));
    const auto embed = full_tensor(net->embed->weight);
    EXPECT_LE(embed.abs().max().item<double>(), 3);
    EXPECT_GT(embed.abs().max().item<double>(), 2);
    EXPECT_NEAR(full_tensor(net->head->weight).mean().item<double>(), 1, 0.6);
    auto head = deferred([] { return torch::nn::Linear(7, 23); });
    materialize(*head, {.seed = 4, .init = [](const std::string&, InitTarget& target) { return target.normal(1, 2), true; }});
    EXPECT_FALSE(at::equal(full_tensor(net->head->weight), head->weight.detach())) << "the name decides, as for recorded values";
    auto plain = late_net();
    materialize(*plain, {.seed = 4});
    EXPECT_TRUE(at::equal(full_tensor(net->blocks[2]->up->weight), plain->blocks[2]->up->weight.detach())) << "not asked for: as recorded";
  });
}

TEST(DeferredInit, MemoryOnlyLeavesParametersToBeLoadedAndFillsBuffers) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto zoo = late_zoo();
    fully_shard(zoo, Mesh::shard(world));
    materialize(*zoo, {.fill = false});
    EXPECT_TRUE(at::equal(full_tensor(zoo->linear->weight), at::zeros({5, 8})));
    EXPECT_TRUE(at::equal(zoo->positions, at::arange(6)));
    EXPECT_TRUE(at::equal(zoo->batch->running_var, at::ones({6})));
  });
}

TEST(DeferredInit, MaterialisingTwiceChangesNothing) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto net = late_net();
    shard_tiny_net(net, Mesh::shard(world));
    materialize(*net, {.seed = 1});
    const auto before = state_of(*net);
    materialize(*net, {.seed = 2});
    expect_same(state_of(*net), before, "");
  });
}

TEST(DeferredInit, ModelShardedWhileDeferringIsWhole) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    auto eager = make_tiny_net(5);
    const auto before = state_of(*eager);
    {
      const DeferredInit guard;
      shard_tiny_net(eager, mesh);
      auto late = TinyNet(23, 7, 1);
      materialize(*late);
      EXPECT_TRUE(late->head->weight.is_cpu());
    }
    expect_same(state_of(*eager), before, "");
  });
}

TEST(DeferredInit, UseBeforeMaterialisationNamesTheParameters) {
  for (int size : {1, 2})
    run_local_world(size, [&](std::shared_ptr<World> world) {
      auto net = late_net();
      shard_tiny_net(net, Mesh::shard(world));
      const auto expect_clear = [](const std::string& message, const std::string& name) {
        EXPECT_NE(message.find("parameters should be materialized from meta device before training"), message.npos) << message;
        EXPECT_NE(message.find(name), message.npos) << message;
        EXPECT_NE(message.find("Try: fsdpp::materialize"), message.npos) << message;
      };
      expect_clear(message_of<UsageError>([&] { (void)net(tokens(1)); }), "embed.weight");
      expect_clear(message_of<UsageError>([&] { (void)full_tensor(net->blocks[1]->scale); }), "scale");
      expect_clear(message_of<UsageError>([&] { unit_of(*net->blocks[0]).unshard(); }), "up.weight");
      const auto written = message_of<UsageError>([&] {
        at::NoGradGuard no_grad;
        net->head->weight.fill_(1);
      });
      EXPECT_NE(written.find("aten::fill_"), written.npos) << written;
      EXPECT_NE(written.find("head.weight"), written.npos) << written;
      EXPECT_NE(written.find("no memory yet"), written.npos) << written;
      materialize(*net);
      const auto ids = tokens(1);
      token_loss(net(ids), ids).backward();
      EXPECT_TRUE(net->head->weight.grad().defined());
    });
}

TEST(DeferredInit, UnitOfParametersWithAndWithoutMemoryIsRefused) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto net = late_net();
    net->head = net->replace_module("head", torch::nn::Linear(torch::nn::LinearOptions(7, 23).bias(false)));
    auto mesh = Mesh::shard(world);
    const auto message = message_of<UsageError>([&] { fully_shard(net, mesh); });
    EXPECT_NE(message.find("'embed.weight' is on the meta device"), message.npos) << message;
    EXPECT_NE(message.find("'head.weight' of the same unit on cpu"), message.npos) << message;
    for (auto& b : net->blocks) fully_shard(b, mesh);  // whole units of either kind may live together
    fully_shard(net->embed, mesh);
    fully_shard(net, mesh);
    materialize(*net);
    for (auto& p : net->parameters()) EXPECT_TRUE(at::isfinite(full_tensor(p)).all().item<bool>());
  });
}

}  // namespace
}  // namespace fsdpp::test
