#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/enforce.h"
#include "checkpoint/dtype_table.h"
#include "checkpoint/file_io.h"
#include "checkpoint/safetensors.h"

namespace fsdpp::dcp {
namespace {

uint64_t bytes_of(const TensorSpec& spec) {
  uint64_t total = c10::elementSize(spec.dtype);
  for (auto size : spec.sizes) total *= static_cast<uint64_t>(size);
  return total;
}

/// Entries in the order of the specs, with offsets by falling element size.
std::vector<TensorEntry> lay_out(std::span<const TensorSpec> specs) {
  std::vector<size_t> order(specs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return c10::elementSize(specs[a].dtype) > c10::elementSize(specs[b].dtype); });
  std::vector<TensorEntry> entries(specs.size());
  uint64_t position = 0;
  for (auto i : order) {
    const auto begin = position;
    position += bytes_of(specs[i]);
    entries[i] = {specs[i].name, specs[i].dtype, specs[i].sizes, begin, position};
  }
  return entries;
}

/// The length and the header, padded with spaces to a multiple of 8 bytes.
std::string make_header(const std::string& path, std::span<const TensorEntry> entries, const Metadata& metadata) {
  auto header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  for (const auto& e : entries) {
    FSDPP_ENFORCE(e.name != "__metadata__" && !header.contains(e.name), CheckpointError,
                  "{}: two tensors are called '{}' (or it is reserved)", path, e.name);
    header[e.name] = {{"dtype", dtype_name(e.dtype)}, {"shape", e.sizes}, {"data_offsets", {e.begin, e.end}}};
  }
  auto text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>((text.size() >> (8 * i)) & 0xff);
  return length + text;
}

}  // namespace

std::string dtype_name(c10::ScalarType dtype) {
  for (const auto& [name, known] : kDtypes)
    if (known == dtype) return std::string(name);
  fail<CheckpointError>("safetensors has no name for dtype {}; it knows {}", c10::toString(dtype), dtype_names());
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::span<const TensorSpec> specs, const Metadata& metadata)
    : path_(std::move(path)), temporary_(path_ + ".tmp." + std::to_string(::getpid())), entries_(lay_out(specs)),
      written_(specs.size(), false) {
  const auto header = make_header(path_, entries_, metadata);
  data_start_ = header.size();
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  FSDPP_ENFORCE(fd_ >= 0, CheckpointError, "{}: can't create '{}': {}", path_, temporary_, reason(errno));
  const int error = write_fully(fd_, std::as_bytes(std::span(header)), 0);
  if (error == 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
  fail<CheckpointError>("{}: can't write the header: {}", path_, reason(error));
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void SafetensorsWriter::write(size_t index, std::span<const std::byte> data) {
  FSDPP_ENFORCE(index < entries_.size() && !written_[index], CheckpointError, "{}: tensor {} of {} is unknown or written already", path_,
                index, entries_.size());
  const auto& e = entries_[index];
  FSDPP_ENFORCE(data.size() == e.bytes(), CheckpointError, "{}: tensor '{}' has {} bytes, got {}", path_, e.name, e.bytes(), data.size());
  const int error = write_fully(fd_, data, data_start_ + e.begin);
  FSDPP_ENFORCE(error == 0, CheckpointError, "{}: can't write tensor '{}': {}", path_, e.name, reason(error));
  written_[index] = true;
}

void SafetensorsWriter::commit() {
  const auto missing = std::find(written_.begin(), written_.end(), false);
  FSDPP_ENFORCE(missing == written_.end(), CheckpointError, "{}: tensor '{}' was never written", path_,
                entries_[static_cast<size_t>(missing - written_.begin())].name);
  FSDPP_ENFORCE(::fsync(fd_) == 0, CheckpointError, "{}: can't flush '{}': {}", path_, temporary_, reason(errno));
  FSDPP_ENFORCE(::rename(temporary_.c_str(), path_.c_str()) == 0, CheckpointError, "{}: can't rename '{}': {}", path_, temporary_,
                reason(errno));
  ::close(std::exchange(fd_, -1));
  const int error = sync_folder_of(path_);
  FSDPP_ENFORCE(error == 0, CheckpointError, "{}: written, but its folder can't be flushed: {}", path_, reason(error));
}

}  // namespace fsdpp::dcp
