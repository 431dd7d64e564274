#pragma once
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "fsdpp/base/export.h"

namespace fsdpp::dcp {

/// Writes all parameters and buffers of the model, gathered, to one safetensors file. Keys are the names of
/// named_parameters() / named_buffers(); a tied parameter is written once, under its first name. Rank 0 writes, one tensor in
/// memory at a time; the file appears under its name only when complete (temporary file + rename). Buffers are rank 0's.
/// Collective over the mesh of the model's units. Throws CheckpointError on every rank if rank 0 can't write.
FSDPP_API void save_full(const torch::nn::Module& model, const std::string& path);

struct LoadResult {
  std::vector<std::string> missing;     ///< names of the model that the file lacks
  std::vector<std::string> unexpected;  ///< names of the file that the model lacks
};
/// Reads a safetensors file into the model, each rank only its own rows. dtypes are converted to the parameter's. Works before
/// and after fully_shard. strict: CheckpointError if a name is missing or unexpected, listing both, before anything is changed.
/// A wrong shape is a CheckpointError with both shapes in either mode, before anything is changed.
FSDPP_API LoadResult load_full(torch::nn::Module& model, const std::string& path, bool strict = true);

}  // namespace fsdpp::dcp
