#include "options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "fsdpp/base/error.h"
#include "report.h"

namespace minillm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Options parse(std::vector<const char*> flags) {
  flags.insert(flags.begin(), "minillm");
  return parse_options(static_cast<int>(flags.size()), flags.data()).value();
}

std::string error_of(std::vector<const char*> flags) {
  try {
    (void)parse(std::move(flags));
  } catch (const fsdpp::ConfigError& e) {
    return e.what();
  }
  return "no error";
}

TEST(Flags, None_IsTheSeedModel) {
  const auto o = parse({});
  EXPECT_EQ(o.model.vocab, 32000);
  EXPECT_EQ(o.model.dim, 2048);
  EXPECT_EQ(o.model.layers, 12);
  EXPECT_EQ(o.model.heads, 16);
  EXPECT_EQ(o.batch, 8);
  EXPECT_EQ(o.seq, 1024);
  EXPECT_EQ(o.lr, 3e-4);
  EXPECT_EQ(o.adam_eps, 1e-8);
  EXPECT_EQ(o.clip, 0.0);
  EXPECT_TRUE(o.shard);
  EXPECT_FALSE(o.synthetic || o.dry_run || o.shuffle || o.model.recompute || o.model.recompute_norms);
}

TEST(Flags, CopyEngineGathers_BringSymmetricBuffers) {
  EXPECT_FALSE(parse({}).symmetric_buffers);
  EXPECT_TRUE(parse({"--symmetric-buffers"}).symmetric_buffers);
  EXPECT_FALSE(parse({"--symmetric-buffers"}).copy_engine_gathers);
  EXPECT_TRUE(parse({"--copy-engine-gathers"}).symmetric_buffers);
  EXPECT_THAT(error_of({"--no-shard", "--symmetric-buffers"}), HasSubstr("--no-shard"));
}

TEST(Flags, EachOfThem_ReachesItsOption) {
  const auto o = parse({"--vocab", "300",  "--dim",   "64",  "--layers",    "3",          "--heads",  "2",       "--batch",     "5",
                        "--seq",   "17",   "--steps", "9",   "--lr",        "0.5",        "--seed",   "11",      "--device",    "cpu",
                        "--clip",  "0.25", "--data",  "a",   "b.bin",       "--shuffle",  "4",        "--init",  "i",           "--save-full",
                        "s",       "--metrics", "m", "--grad-accum", "6",   "--precision", "bf16",    "--no-shard", "--log-every", "2",
                        "--recompute"});
  EXPECT_TRUE(o.model.recompute);
  EXPECT_TRUE(parse({"--recompute-norms"}).model.recompute_norms);
  EXPECT_EQ(std::tuple(o.model.vocab, o.model.dim, o.model.layers, o.model.heads), std::tuple(300, 64, 3, 2));
  EXPECT_EQ(std::tuple(o.batch, o.seq, o.steps, o.grad_accum, o.log_every), std::tuple(5, 17, 9, 6, 2));
  EXPECT_EQ(std::tuple(o.lr, o.clip, o.seed), std::tuple(0.5, 0.25, uint64_t{11}));
  EXPECT_THAT(o.data, ElementsAre("a", "b.bin"));
  EXPECT_EQ(o.shuffle, std::optional<uint64_t>(4));
  EXPECT_EQ(std::tuple(o.init, o.save_full, o.metrics), std::tuple(std::string("i"), std::string("s"), std::string("m")));
  EXPECT_EQ(o.precision, Precision::BF16);
  EXPECT_FALSE(o.shard || o.cuda || o.synthetic);
}

TEST(Flags, PrecisionOnCpu_IsFp32UnlessAskedFor) {
  EXPECT_EQ(parse({"--device", "cpu"}).precision, Precision::FP32);
  EXPECT_EQ(parse({"--device", "cpu", "--precision", "bf16"}).precision, Precision::BF16);
}

TEST(Flags, WrongOnes_AreErrorsThatNameThem) {
  EXPECT_THAT(error_of({"--bach", "3"}), HasSubstr("--bach"));
  EXPECT_THAT(error_of({"--batch", "0"}), HasSubstr("--batch"));
  EXPECT_THAT(error_of({"--batch", "two"}), HasSubstr("--batch"));
  EXPECT_THAT(error_of({"--steps", "-1"}), testing::AllOf(HasSubstr("--steps"), HasSubstr("at least 0, got -1")));
  EXPECT_THAT(error_of({"--seq", "99999999999999999999"}), HasSubstr("--seq"));
  EXPECT_THAT(error_of({"--lr", "nan"}), HasSubstr("--lr"));
  EXPECT_THAT(error_of({"--clip", "0"}), HasSubstr("--clip"));
  EXPECT_THAT(error_of({"--precision", "fp64"}), HasSubstr("fp64"));
  EXPECT_THAT(error_of({"--dim", "65", "--heads", "2"}), HasSubstr("--dim 65"));
  EXPECT_THAT(error_of({"--world", "4"}), HasSubstr("--dry-run"));
  EXPECT_THAT(error_of({"--data", "synthetic", "--shuffle", "1"}), HasSubstr("--shuffle"));
  EXPECT_THAT(error_of({"--vocab", "255"}), HasSubstr("--vocab 255"));
  for (const char* without : {"--plain-ops", "--no-shard"}) EXPECT_THAT(error_of({"--recompute-norms", without}), HasSubstr("--recompute-norms"));
  EXPECT_EQ(error_of({"--vocab", "255", "--data", "synthetic"}), "no error");
}

TEST(Metrics, Line_IsAJsonObjectAtFullPrecision) {
  const double loss = 0.1 + 0.2;
  const auto full = nlohmann::json::parse(metrics_line({3, loss, 0.5, 0.25, 1000, 77}, 0.125));
  EXPECT_EQ(full["step"], 3);
  EXPECT_EQ(full["loss"].get<double>(), loss);
  EXPECT_EQ(full["grad_norm"], 0.5);
  EXPECT_EQ(full["step_ms"], 250.0);
  EXPECT_EQ(full["tokens_per_s"], 4000.0);
  EXPECT_EQ(full["mfu"], 0.125);
  EXPECT_EQ(full["peak_bytes"], 77);
  const auto bare = nlohmann::json::parse(metrics_line({0, loss, std::nullopt, 1, 1, 1}, std::nullopt));
  EXPECT_TRUE(bare["grad_norm"].is_null() && bare["mfu"].is_null());
}

TEST(Metrics, File_HoldsOneLineForEachStepOfRankZero) {
  const auto path = (std::filesystem::temp_directory_path() / ("minillm_metrics_" + std::to_string(::getpid()))).string();
  Report report({.enabled = true, .steps = 3, .log_every = 10, .metrics = path});
  testing::internal::CaptureStdout();
  for (int64_t s = 0; s < 3; ++s) report.step({s, 2.5, std::nullopt, 1.0, 10.0, 2'000'000'000});
  report.summary();
  const auto out = testing::internal::GetCapturedStdout();
  EXPECT_THAT(out, HasSubstr("Step 0 | Loss: 2.5000 | Peak RSS: 2.00 GB\nStep 2 |"));
  EXPECT_THAT(out, HasSubstr("Done: 3 steps on 1 rank"));
  std::ifstream in(path);
  int64_t count = 0;
  for (std::string line; std::getline(in, line); ++count) EXPECT_EQ(nlohmann::json::parse(line)["step"], count);
  EXPECT_EQ(count, 3);
  std::filesystem::remove(path);
  EXPECT_THROW(Report({.enabled = true, .metrics = "/no/such/folder/m"}), fsdpp::ConfigError);
}

}  // namespace
}  // namespace minillm
