#include "model.h"

#include <ATen/Context.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "dry_run.h"
#include "fsdpp/api/fully_shard.h"
#include "fsdpp/base/error.h"
#include "trainer.h"

namespace minillm {
namespace {

using testing::HasSubstr;

const ModelConfig kTiny{.vocab = 29, .dim = 12, .layers = 2, .heads = 3};

std::vector<std::string> names_of(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  return names;
}

TEST(MiniLLM, ParameterNames_AreThoseOfThePythonScriptInItsOrder) {
  const std::vector<std::string> block{"norm1.weight",         "attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight",
                                       "attn.out_proj.bias", "norm2.weight",        "ffn.0.weight",      "ffn.2.weight"};
  std::vector<std::string> expected{"embed.weight"};
  for (const char* layer : {"layers.0.", "layers.1."})
    for (const auto& name : block) expected.push_back(layer + name);
  expected.push_back("head.weight");
  EXPECT_EQ(names_of(*MiniLLM(kTiny)), expected);
}

TEST(MiniLLM, ShapesWithoutBuilding_AreThoseOfTheModel) {
  MiniLLM model(kTiny);
  const auto params = model->named_parameters();
  for (const auto& shape : vocabulary_shapes(kTiny))
    for (const char* unit : {"embed.", "head."}) EXPECT_EQ(params[unit + shape.name].sizes(), shape.sizes) << unit << shape.name;
  for (const auto& shape : block_shapes(kTiny)) EXPECT_EQ(params["layers.1." + shape.name].sizes(), shape.sizes) << shape.name;
  int64_t total = 0;
  for (const auto& item : params) total += item.value().numel();
  EXPECT_EQ(parameter_count(kTiny), total);
  EXPECT_EQ(params.size(), 2 + 2 * block_shapes(kTiny).size());
}

TEST(MiniLLM, SeedConfiguration_HasItsParametersAndFlops) {
  EXPECT_EQ(parameter_count({}), 735199232);
  EXPECT_EQ(flops_per_token({}, 1024), 6.0 * (735199232 - 32000 * 2048) + 12.0 * 12 * 2048 * 1024);
}

TEST(MiniLLM, Initialisation_HasPyTorchsDistributions) {
  at::manual_seed(3);
  const ModelConfig config{.vocab = 1000, .dim = 64, .layers = 1, .heads = 2};
  MiniLLM model(config);
  auto std_of = [](const at::Tensor& t) { return t.std().item<double>(); };
  auto largest = [](const at::Tensor& t) { return t.abs().max().item<double>(); };
  EXPECT_NEAR(std_of(model->embed->weight), 1.0, 0.02);
  EXPECT_GT(largest(model->embed->weight), 3.0);
  const auto& block = model->blocks[0];
  // kaiming_uniform(a = √5): bound 1/√fan_in. xavier_uniform over (3·D, D): bound √(6 / 4·D).
  const std::vector<std::pair<at::Tensor, double>> uniform{{model->head->weight, 1 / 8.0},
                                                           {block->ffn->up->weight, 1 / 8.0},
                                                           {block->ffn->down->weight, 1 / 16.0},
                                                           {block->attn->out_proj->weight, 1 / 8.0},
                                                           {block->attn->in_proj_weight, std::sqrt(6.0 / 256)}};
  for (const auto& [weight, bound] : uniform) {
    EXPECT_LE(largest(weight), bound);
    EXPECT_NEAR(std_of(weight), bound / std::sqrt(3.0), 0.02 * bound);
  }
  EXPECT_EQ(largest(block->attn->in_proj_bias), 0.0);
  EXPECT_EQ(largest(block->attn->out_proj->bias), 0.0);
  EXPECT_EQ(block->norm1->weight.min().item<float>(), 1.0f);
}

TEST(MiniLLM, DeferredInit_GivesTheSameBitsOnEveryNumberOfRanks) {
  Options options;
  options.model = kTiny;
  options.seed = 5;
  options.deferred_init = true;
  const auto plain = build_model(options, {});
  const auto want = plain->named_parameters();
  EXPECT_EQ(want["layers.1.norm1.weight"].min().item<float>(), 1.0f);
  EXPECT_NEAR(want["embed.weight"].std().item<double>(), 1.0, 0.2);
  for (const int ranks : {1, 2, 3})
    fsdpp::comm::run_local_world(ranks, [&](const std::shared_ptr<fsdpp::comm::World>& world) {
      const auto model = build_model(options, {fsdpp::comm::Mesh::shard(world), world->device(), world->rank(), world->size()});
      for (const auto& item : model->named_parameters())
        EXPECT_TRUE(at::equal(fsdpp::full_tensor(item.value()), want[item.key()])) << item.key() << " on " << ranks;
    });
  options.seed = 6;
  EXPECT_FALSE(at::equal(build_model(options, {})->embed->weight, want["embed.weight"]));
}

TEST(MiniLLM, SameSeed_GivesTheSameWeights) {
  at::manual_seed(1);
  MiniLLM a(kTiny);
  at::manual_seed(1);
  MiniLLM b(kTiny);
  MiniLLM c(kTiny);
  EXPECT_TRUE(at::equal(a->head->weight, b->head->weight));
  EXPECT_FALSE(at::equal(a->head->weight, c->head->weight));
}

TEST(MiniLLM, HeadsDoNotDivideDim_IsAConfigError) {
  EXPECT_THROW(MiniLLM(ModelConfig{.vocab = 8, .dim = 10, .layers = 1, .heads = 4}), fsdpp::ConfigError);
}

TEST(RMSNorm, OnVectorsThatTellItFromOtherFormulas_IsTheFormula) {
  RMSNorm norm(ModelConfig{.dim = 4});
  const auto x = at::randn({2, 4}, at::kDouble);
  norm->to(at::kDouble);
  const auto expected = x / (x.pow(2).mean(-1, true) + std::numeric_limits<double>::epsilon()).sqrt();
  EXPECT_LT((norm(x) - expected).abs().max().item<double>(), 1e-12);
}

TEST(Attention, IsNotCausalAndEveryTokenSeesAll) {
  Attention attention(ModelConfig{.dim = 12, .heads = 3});
  auto x = at::randn({1, 5, 12});
  const auto before = attention(x).clone();
  x[0][4] += 1;
  EXPECT_GT((attention(x) - before)[0][0].abs().max().item<float>(), 1e-6f);
}

TEST(MeanLoss, Is32BitAlsoForBfloat16Logits) {
  const auto logits = at::randn({3, 50, 29});
  const auto targets = at::randint(29, {3, 50}, at::kLong);
  const auto exact = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten()).item<double>();
  EXPECT_NEAR(mean_loss(logits, targets).item<double>(), exact, 1e-6 * exact);
  const auto loss = mean_loss(logits.to(at::kBFloat16), targets);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), exact, 5e-3 * exact);
}

TEST(MiniLLM, FusedOperators_GiveTheLossAndGradientsOfLibTorchs) {
  auto config = kTiny;
  at::manual_seed(3);
  MiniLLM fused(config);
  config.fused = false;
  at::manual_seed(3);
  MiniLLM plain(config);
  const auto tokens = at::randint(29, {2, 5}, at::kLong), targets = at::randint(29, {2, 5}, at::kLong);
  const auto a = mean_loss(fused, tokens, targets), b = mean_loss(plain, tokens, targets);
  EXPECT_NEAR(a.item<double>(), b.item<double>(), 1e-6 * b.item<double>());
  EXPECT_NEAR(mean_loss(fused(tokens), targets).item<double>(), b.item<double>(), 1e-6 * b.item<double>());
  a.backward(), b.backward();
  const auto p = fused->named_parameters(), q = plain->named_parameters();
  for (const auto& item : p) {
    const auto got = item.value().grad(), want = q[item.key()].grad();
    EXPECT_LT((got - want).norm().item<double>(), 1e-5 * want.norm().item<double>()) << item.key();
  }
}

TEST(MiniLLM, Recomputation_GivesTheSameLossAndGradients) {
  auto config = kTiny;
  at::manual_seed(3);
  MiniLLM kept(config);
  config.recompute = true;
  at::manual_seed(3);
  MiniLLM recomputed(config);
  const auto tokens = at::randint(29, {2, 5}, at::kLong);
  const auto a = mean_loss(kept(tokens), tokens), b = mean_loss(recomputed(tokens), tokens);
  EXPECT_TRUE(at::equal(a, b));
  a.backward(), b.backward();
  const auto p = kept->parameters(), q = recomputed->parameters();
  for (size_t i = 0; i < p.size(); ++i) EXPECT_TRUE(at::equal(p[i].grad(), q[i].grad())) << i;
}

// Losses and gradients of two steps, bf16.
std::vector<at::Tensor> results_of(const Options& options, const std::shared_ptr<fsdpp::comm::World>& world) {
  auto model = build_model(options, {fsdpp::comm::Mesh::shard(world), world->device(), world->rank(), world->size()});
  fsdpp::optim::AdamW optimizer(*model, {.lr = 0.01});
  std::vector<at::Tensor> results;
  const auto tokens = at::arange(10).view({2, 5});
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    results.push_back(mean_loss(model, tokens, tokens + 1));
    results.back().backward();
    for (const auto& p : model->parameters()) results.push_back(p.grad().clone());
    optimizer.step();
  }
  return results;
}

TEST(MiniLLM, NormsMadeAgain_GiveTheBitsOfNormsThatAreKept) {
  Options options;
  options.model = kTiny;
  options.deferred_init = true;  // the same weights in every thread
  for (const auto precision : {Precision::FP32, Precision::BF16})
    for (const bool recompute : {false, true})
      for (const int ranks : {1, 2}) {
        options.precision = precision, options.model.recompute = recompute;
        fsdpp::comm::run_local_world(ranks, [&](const std::shared_ptr<fsdpp::comm::World>& world) {
          auto again = options;
          again.model.recompute_norms = true;
          const auto want = results_of(options, world), got = results_of(again, world);
          for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << i << " of " << want.size();
        });
      }
}

// How one rank of two gathers and reduces in a step.
class Units : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(FusedAndPlain, Units, testing::Bool());

TEST_P(Units, AStepGathersEmbeddingAndHeadOnceAndBlocksTwice) {
  Options options;
  options.model = kTiny;
  options.model.fused = GetParam();
  fsdpp::comm::run_local_world(2, [&](const std::shared_ptr<fsdpp::comm::World>& world) {
    auto model = build_model(options, {fsdpp::comm::Mesh::shard(world), world->device(), world->rank(), world->size()});
    const auto tokens = at::randint(29, {2, 5}, at::kLong);
    for (const bool by_logits : {false, true, true}) {
      for (const auto& unit : fsdpp::units(*model)) unit.reset_stats();
      (by_logits ? mean_loss(model(tokens), tokens) : mean_loss(model, tokens, tokens)).backward();
      auto expect = [&](const torch::nn::Module& module, int64_t forward, int64_t backward, int64_t reduces) {
        const auto unit = fsdpp::unit_of(module);
        const auto stats = unit.stats();
        EXPECT_EQ(stats.forward_gathers, forward) << unit.name();
        EXPECT_EQ(stats.backward_gathers, backward) << unit.name();
        EXPECT_EQ(stats.reduces, reduces) << unit.name();
        EXPECT_TRUE(unit.is_sharded()) << unit.name();
      };
      expect(*model->embed, 1, 0, 1);
      for (const auto& block : model->blocks) expect(*block, 1, 1, 1);
      expect(*model->head, 1, 0, 1);
      expect(*model, 0, 0, 0);
    }
  });
}

// What is freed before the blocks' backward: at their first gradient the optimizer is done with the head.
TEST(Units, HeadIsUpdatedAndShardedBeforeBackwardReachesTheBlocks) {
  Options options;
  options.model = kTiny;
  for (const int ranks : {1, 2})
    fsdpp::comm::run_local_world(ranks, [&](const std::shared_ptr<fsdpp::comm::World>& world) {
      auto model = build_model(options, {fsdpp::comm::Mesh::shard(world), world->device(), world->rank(), world->size()});
      std::vector<std::string> order;
      for (const auto& item : model->named_parameters()) {
        auto seen = [&order, &model, name = item.key()](const at::Tensor&) {
          EXPECT_TRUE(name == "head.weight" || fsdpp::unit_of(*model->head).is_sharded()) << name;
          order.push_back(name);
        };
        fsdpp::register_post_accumulate_grad_hook(item.value(), seen);
      }
      const auto tokens = at::randint(29, {2, 5}, at::kLong);
      mean_loss(model, tokens, tokens).backward();
      ASSERT_EQ(order.size(), model->parameters().size());
      EXPECT_EQ(order.front(), "head.weight");
      EXPECT_EQ(order.back(), "embed.weight");
    });
}

class DryRun : public testing::TestWithParam<std::tuple<int, std::pair<Precision, bool>, int64_t, bool>> {};
INSTANTIATE_TEST_SUITE_P(All, DryRun,
                         testing::Combine(testing::Values(1, 2, 3),
                                          testing::Values(std::pair(Precision::FP32, false),
                                                          std::pair(Precision::BF16, false),
                                                          std::pair(Precision::BF16, true)),
                                          testing::Values(int64_t{1}, int64_t{2}), testing::Bool()));

TEST_P(DryRun, Numbers_AreThoseOfTheShardedModel) {
  Options options;
  options.model = kTiny;
  std::pair<Precision, bool> dtypes;
  std::tie(std::ignore, dtypes, options.grad_accum, options.step_in_backward) = GetParam();
  std::tie(options.precision, options.reduce_bf16) = dtypes;
  options.keep_cast_shard = options.step_in_backward;
  const int world_size = std::get<0>(GetParam());
  const auto planned = memory_plan(options, world_size).engine;
  fsdpp::comm::run_local_world(world_size, [&](auto world) {
    const auto model = build_model(options, {fsdpp::comm::Mesh::shard(world), world->device(), world->rank(), world->size()});
    fsdpp::optim::AdamW optimizer(*model);
    if (options.step_in_backward) optimizer.step_in_backward(*model);
    const auto real = fsdpp::memory_formula(*model, options.grad_accum > 1);
    EXPECT_EQ(planned.shards, real.shards);
    EXPECT_EQ(planned.cast_shards, real.cast_shards);
    EXPECT_EQ(planned.sharded_gradients, real.sharded_gradients);
    EXPECT_EQ(planned.gathered, real.gathered);
    EXPECT_EQ(planned.gradients, real.gradients);
  });
}

TEST(DryRunText, NamesPlanAndFormulaForAnyWorld) {
  const auto text = dry_run_text(Options{}, 4096);
  for (const char* part : {"735199232 parameters", "14 units", "4096 ranks", "attn.in_proj_weight", "embed and head", "gathered buffers", "total"})
    EXPECT_THAT(text, HasSubstr(part));
}

}  // namespace
}  // namespace minillm
