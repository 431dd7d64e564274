#include "fsdpp/checkpoint/full_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <set>

#include "base/enforce.h"
#include "checkpoint/agree.h"
#include "checkpoint/model_tensors.h"
#include "checkpoint/safetensors.h"

namespace fsdpp::dcp {
namespace {

std::span<const std::byte> bytes_of(const at::Tensor& t) { return {static_cast<const std::byte*>(t.const_data_ptr()), t.nbytes()}; }

std::vector<TensorSpec> specs_of(const ModelTensors& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& t : tensors.items) specs.push_back({t.name(), t.handle.scalar_type(), t.global_sizes()});
  return specs;
}

at::Tensor gathered(const ModelTensor& tensor) {
  const auto local = tensor.handle.detach();
  return tensor.sharded ? shard::full_tensor(*tensor.sharded, local) : local;
}

/// Takes part in every gather; writes where there is a writer. After a failed write it only takes part; the failure comes back.
std::exception_ptr gather_and_write(const ModelTensors& tensors, SafetensorsWriter* writer) {
  std::exception_ptr failure;
  for (size_t i = 0; i < tensors.items.size(); ++i) {
    const auto full = gathered(tensors.items[i]);
    if (writer == nullptr || failure) continue;
    try {
      writer->write(i, bytes_of(full.cpu().contiguous()));
    } catch (const std::exception&) {  // also a lack of memory for the copy: the others still wait for this rank's part
      failure = std::current_exception();
    }
  }
  return failure;
}

/// Where a model tensor's data is in the file: under the first of its names that is there.
const TensorEntry* find_entry(const SafetensorsReader& file, const ModelTensor& tensor) {
  for (const auto& name : tensor.names)
    if (const auto* entry = file.find(name)) return entry;
  return nullptr;
}

LoadResult compare_names(const SafetensorsReader& file, const ModelTensors& tensors) {
  LoadResult result;
  std::set<std::string> known;
  for (const auto& t : tensors.items) {
    known.insert(t.names.begin(), t.names.end());
    if (find_entry(file, t) == nullptr) result.missing.push_back(t.name());
  }
  for (const auto& e : file.entries())
    if (!known.contains(e.name)) result.unexpected.push_back(e.name);
  return result;
}

void check_file(const SafetensorsReader& file, const ModelTensors& tensors, const LoadResult& names, bool strict) {
  for (const auto& t : tensors.items) {
    const auto* entry = find_entry(file, t);
    if (entry == nullptr) continue;
    FSDPP_ENFORCE(entry->sizes == t.global_sizes(), CheckpointError, "{}: tensor '{}' has shape [{}] in the file, [{}] in the model",
                  file.path(), entry->name, fmt::join(entry->sizes, ", "), fmt::join(t.global_sizes(), ", "));
  }
  FSDPP_ENFORCE(!strict || (names.missing.empty() && names.unexpected.empty()), CheckpointError,
                "{}: the file does not match the model. Missing in the file: [{}]. Not in the model: [{}]. Try: strict = false", file.path(),
                fmt::join(names.missing, ", "), fmt::join(names.unexpected, ", "));
}

/// Copies this rank's part of the entry into the model's tensor.
void load_tensor(const SafetensorsReader& file, const TensorEntry& entry, const ModelTensor& tensor) {
  const auto width = c10::elementSize(entry.dtype);
  auto data = file.data(entry);
  auto target = tensor.handle.detach();
  if (tensor.sharded) {
    const auto range = tensor.sharded->local();
    data = data.subspan(static_cast<size_t>(range.begin) * width, static_cast<size_t>(range.size()) * width);
  }
  auto staged = at::empty(target.sizes(), at::TensorOptions().dtype(entry.dtype));
  if (!data.empty()) std::memcpy(staged.data_ptr(), data.data(), data.size());  // the file's data need not be aligned
  target.copy_(staged);
}

}  // namespace

void save_full(const torch::nn::Module& model, const std::string& path) {
  const at::NoGradGuard no_grad;
  const auto tensors = collect_tensors(model);
  const bool writes = !tensors.mesh || tensors.mesh->world().rank() == 0;
  std::unique_ptr<SafetensorsWriter> writer;
  run_and_agree(tensors.mesh.get(), [&] {
    if (writes) writer = std::make_unique<SafetensorsWriter>(path, specs_of(tensors), Metadata{{"format", "pt"}});
  });
  const auto failure = gather_and_write(tensors, writer.get());
  run_and_agree(tensors.mesh.get(), [&] {
    if (failure) std::rethrow_exception(failure);
    if (writer) writer->commit();
  });
}

LoadResult load_full(torch::nn::Module& model, const std::string& path, bool strict) {
  const at::NoGradGuard no_grad;
  const auto tensors = collect_tensors(model);
  LoadResult names;
  std::unique_ptr<SafetensorsReader> file;
  run_and_agree(tensors.mesh.get(), [&] {
    file = std::make_unique<SafetensorsReader>(path);
    names = compare_names(*file, tensors);
    check_file(*file, tensors, names, strict);
  });
  for (const auto& t : tensors.items)
    if (const auto* entry = find_entry(*file, t)) load_tensor(*file, *entry, t);
  return names;
}

}  // namespace fsdpp::dcp
