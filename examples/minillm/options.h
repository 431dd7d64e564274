#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model.h"

namespace minillm {

enum class Precision { BF16, FP32 };

/// What the flags say; see README.md.
struct Options {
  ModelConfig model;
  int64_t batch = 8;  // per rank
  int64_t seq = 1024;
  int64_t steps = 20;
  int64_t grad_accum = 1;
  double lr = 3e-4;
  double adam_eps = 1e-8;
  double clip = 0.0;  // 0: none
  uint64_t seed = 0;
  bool cuda = false;
  Precision precision = Precision::FP32;
  bool reduce_bf16 = false;  // gradients are reduced in bf16, not fp32
  bool shard = true;
  bool deferred_init = false;
  bool graph = false;             // the whole step as one CUDA graph
  bool step_in_backward = false;  // the optimizer updates each unit as soon as its gradients are there
  bool keep_cast_shard = false;   // shards in bf16 too, written by the optimizer
  bool symmetric_buffers = false;    // gathered and gradient buffers registered with NCCL
  bool copy_engine_gathers = false;  // implies them

  bool synthetic = false;
  std::vector<std::string> data;  // empty and not synthetic: LibTorch's headers
  std::optional<uint64_t> shuffle;

  std::string init, save_full, metrics, profile;  // empty: none
  bool profile_counters = false;
  int64_t log_every = 1;

  bool dry_run = false;
  std::optional<int64_t> plan_world;  // --world
};

/// Those of the head's unit: its gradient is a sum over chunks in fp32, and stays so where nothing travels.
[[nodiscard]] inline Options for_head(Options options, int world_size) {
  options.reduce_bf16 = options.reduce_bf16 && world_size > 1;
  return options;
}

/// Throws fsdpp::ConfigError for a flag that is unknown, out of range or at odds with another. Nothing (and the help text on
/// standard output) for --help.
[[nodiscard]] std::optional<Options> parse_options(int argc, const char* const* argv);

}  // namespace minillm
