#pragma once
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

/// The safetensors file format: 8 bytes of little-endian header length, a JSON header
/// `{"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …, "__metadata__": {"key": "value"}}`, then the
/// data. Offsets count from the start of the data, the tensors' ranges cover it without holes or overlaps.
namespace fsdpp::dcp {

using Metadata = std::map<std::string, std::string>;

/// One tensor of a file.
struct TensorEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> sizes;
  uint64_t begin = 0;  ///< first byte, from the start of the data
  uint64_t end = 0;    ///< one past the last byte
  [[nodiscard]] uint64_t bytes() const noexcept { return end - begin; }
};

/// "F32" for Float and so on. Throws CheckpointError for a dtype the format has no name for.
[[nodiscard]] std::string dtype_name(c10::ScalarType dtype);

/// A file mapped read-only into memory; empty files map to an empty span. Throws CheckpointError naming the file.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// A validated, memory-mapped safetensors file. Every defect of the file is a CheckpointError that names the file, and the
/// tensor where there is one.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// In the order of their data.
  [[nodiscard]] const std::vector<TensorEntry>& entries() const noexcept { return entries_; }
  /// nullptr if there is none.
  [[nodiscard]] const TensorEntry* find(const std::string& name) const noexcept;
  [[nodiscard]] const Metadata& metadata() const noexcept { return metadata_; }
  /// The bytes of a tensor, in row-major order; not aligned to anything. Valid while the reader lives.
  [[nodiscard]] std::span<const std::byte> data(const TensorEntry& entry) const noexcept;

 private:
  void parse_header(std::string_view text);
  void check_coverage() const;

  std::string path_;
  MappedFile file_;
  std::vector<TensorEntry> entries_;
  std::unordered_map<std::string, size_t> index_;
  Metadata metadata_;
  size_t data_start_ = 0;
};

/// Shape and dtype of a tensor that is going to be written.
struct TensorSpec {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> sizes;
};

/// Writes a file tensor by tensor. It appears under `path` at commit(); without one nothing remains of it.
/// Throws CheckpointError naming the file and the system's reason.
class SafetensorsWriter {
 public:
  /// Creates the temporary file beside `path` and writes the header. The data is laid out by falling element size, in the
  /// given order within one size, so that every tensor is aligned to its elements.
  SafetensorsWriter(std::string path, std::span<const TensorSpec> specs, const Metadata& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Writes tensor `index` of the specs. Any order, each exactly once.
  void write(size_t index, std::span<const std::byte> data);
  /// Flushes to the disk and renames. All tensors must have been written.
  void commit();

 private:
  std::string path_, temporary_;
  int fd_ = -1;
  uint64_t data_start_ = 0;
  std::vector<TensorEntry> entries_;  // in the order of the specs
  std::vector<bool> written_;
};

}  // namespace fsdpp::dcp
