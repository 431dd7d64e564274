#include "options.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <iostream>

#include "device.h"
#include "fsdpp/base/error.h"
#include "text.h"

namespace minillm {
namespace {

struct Texts {
  std::string device, precision, reduce_dtype;
};

/// A whole number from `low` to 2^40: sizes beyond that are typing errors, and products of two still fit.
CLI::Validator whole_from(int64_t low) {
  constexpr int64_t kHigh = int64_t{1} << 40;
  return CLI::Validator(
      [low](const std::string& value) {
        int64_t number = 0;
        const bool good = CLI::detail::lexical_cast(value, number) && number >= low && number <= kHigh;
        return good ? std::string{} : text("expected a whole number of at least ", low, ", got ", value);
      },
      text("INT >= ", low));
}

CLI::Validator real(bool zero_allowed) {
  const char* words = zero_allowed ? "0 or more" : "more than 0";
  return CLI::Validator(
      [=](const std::string& value) {
        double number = 0;
        const bool good = CLI::detail::lexical_cast(value, number) && (number > 0 || (zero_allowed && number == 0)) && std::isfinite(number);
        return good ? std::string{} : text("expected a number, ", words, ", got ", value);
      },
      words);
}

void add_model_flags(CLI::App& app, Options& o) {
  const auto positive = whole_from(1);
  app.add_option("--vocab", o.model.vocab, "Number of token ids")->check(positive)->capture_default_str();
  app.add_option("--dim", o.model.dim, "Width of the model, a multiple of --heads")->check(positive)->capture_default_str();
  app.add_option("--layers", o.model.layers, "Number of blocks")->check(positive)->capture_default_str();
  app.add_option("--heads", o.model.heads, "Attention heads")->check(positive)->capture_default_str();
}

void add_training_flags(CLI::App& app, Options& o, Texts& t) {
  const auto positive = whole_from(1);
  app.add_option("--batch", o.batch, "Samples of a micro-batch on each rank")->check(positive)->capture_default_str();
  app.add_option("--seq", o.seq, "Tokens of a sample")->check(positive)->capture_default_str();
  app.add_option("--steps", o.steps, "Optimizer steps")->check(whole_from(0))->capture_default_str();
  app.add_option("--grad-accum", o.grad_accum, "Micro-batches of a step")->check(positive)->capture_default_str();
  app.add_option("--lr", o.lr, "AdamW's learning rate")->check(real(true))->capture_default_str();
  app.add_option("--adam-eps", o.adam_eps, "AdamW's epsilon")->check(real(true))->capture_default_str();
  app.add_option("--clip", o.clip, "Largest gradient norm; none if not given")->check(real(false));
  app.add_option("--seed", o.seed, "Seed of the weights and of synthetic data")->capture_default_str();
  app.add_option("--device", t.device, "cpu or cuda; cuda where there is a GPU")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--precision", t.precision, "bf16 or fp32; bf16 on cuda, fp32 on cpu")->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_option("--reduce-dtype", t.reduce_dtype,
                 "bf16 or fp32: gradients on the wire, and those of blocks that --step-in-backward drops on one rank; "
                 "fp32 if not given")
      ->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_flag("--deferred-init", o.deferred_init, "Build without memory, then give each rank its shards: weights by seed and name");
  app.add_flag("--recompute", o.model.recompute, "Keep the input of each block only, compute the rest again in backward");
  app.add_flag("--recompute-norms", o.model.recompute_norms, "Keep no results of norms, make them again in backward");
  app.add_flag("!--plain-ops", o.model.fused, "LibTorch's operators in place of fsdpp's fused ones; always so with --no-shard");
  app.add_flag("--graph", o.graph, "Capture the whole step in a CUDA graph and replay it");
  app.add_flag("--step-in-backward", o.step_in_backward, "Update each unit as soon as its gradients are there, and free them");
  app.add_flag("--keep-cast-shard", o.keep_cast_shard, "Keep the shards in bf16 too, written by the optimizer: nothing to cast before a gather");
  app.add_flag("--symmetric-buffers", o.symmetric_buffers,
               "Register gathered and gradient buffers with NCCL (one host, GPUs with peer access)");
  app.add_flag("--copy-engine-gathers", o.copy_engine_gathers,
               "Gather by copy engines, without a kernel; implies --symmetric-buffers");
  app.add_flag("!--no-shard", o.shard, "Train without sharding, in one process");
}

void add_file_flags(CLI::App& app, Options& o) {
  app.add_option("--data", o.data, "Token files, or 'synthetic'; LibTorch's headers if not given")->expected(1, 1 << 20);
  app.add_option("--shuffle", o.shuffle, "Permute the samples by this seed");
  app.add_option("--init", o.init, "Weights to start from, safetensors");
  app.add_option("--save-full", o.save_full, "Where to write all weights at the end, safetensors");
  app.add_option("--metrics", o.metrics, "Where to write one JSON object for each step");
  app.add_option("--profile", o.profile, "Folder for trace, table and report of three steps");
  app.add_flag("--profile-counters", o.profile_counters, "Then count a few more steps with hardware counters for the report");
  app.add_option("--log-every", o.log_every, "Print every so many steps")->check(whole_from(1))->capture_default_str();
}

void check_combinations(Options& o) {
  auto require = [](bool good, const std::string& message) {
    if (!good) throw fsdpp::ConfigError(message);
  };
  require(o.model.dim % o.model.heads == 0, text("--dim ", o.model.dim, " is not a multiple of --heads ", o.model.heads));
  require(!o.plan_world || o.dry_run, "--world belongs to --dry-run; ranks that train are started by a launcher");
  require(!(o.step_in_backward && o.clip > 0), "--step-in-backward frees the gradients before their norm is known: not with --clip");
  require(o.shard || !(o.step_in_backward || o.keep_cast_shard), "--step-in-backward and --keep-cast-shard have no meaning with --no-shard");
  o.symmetric_buffers = o.symmetric_buffers || o.copy_engine_gathers;
  require(o.shard || !o.symmetric_buffers, "--symmetric-buffers and --copy-engine-gathers have no meaning with --no-shard");
  o.model.fused = o.model.fused && o.shard;
  require(o.model.fused || !o.model.recompute_norms, "--recompute-norms is done by fsdpp's operators: not with --plain-ops or --no-shard");
  require(!o.profile_counters || !o.profile.empty(), "--profile-counters adds to what --profile DIR writes. Try: give both");
  o.synthetic = o.data == std::vector<std::string>{"synthetic"};
  require(!(o.synthetic && o.shuffle), "--shuffle has no meaning with --data synthetic");
  require(o.synthetic || !o.data.empty() || o.model.vocab >= 256, text("--vocab ", o.model.vocab, " is too small for text: bytes need 256"));
}

void choose_device(Options& o, const Texts& t) {
  const bool available = cuda_available();
  if (t.device == "cuda" && !available && !o.dry_run)
    throw fsdpp::ConfigError("--device cuda: no CUDA device can be used here (none in the machine, or a build without CUDA). Try: --device cpu");
  o.cuda = t.device.empty() ? available : t.device == "cuda";
  o.precision = t.precision.empty() ? (o.cuda ? Precision::BF16 : Precision::FP32) : (t.precision == "bf16" ? Precision::BF16 : Precision::FP32);
  o.reduce_bf16 = t.reduce_dtype == "bf16";
  if (!o.reduce_bf16) return;
  if (o.precision == Precision::FP32)
    throw fsdpp::ConfigError("--reduce-dtype bf16 belongs to --precision bf16, got fp32");
  if (!o.shard) throw fsdpp::ConfigError("--reduce-dtype has no meaning with --no-shard: nothing is reduced");
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv) {
  Options options;
  Texts texts;
  CLI::App app("Trains MiniLLM, sharded over the ranks of a launcher (fsdpp-run, torchrun --no-python, mpirun, srun).", "minillm");
  add_model_flags(app, options);
  add_training_flags(app, options, texts);
  add_file_flags(app, options);
  app.add_flag("--dry-run", options.dry_run, "Print layout plan and memory, then stop");
  app.add_option("--world", options.plan_world, "Ranks to plan for, with --dry-run")->check(CLI::Range(1, 1 << 20));
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& e) {
    throw fsdpp::ConfigError(text(e.what(), ". Try: minillm --help"));
  }
  check_combinations(options);
  choose_device(options, texts);
  return options;
}

}  // namespace minillm
