#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>

#include "base/enforce.h"
#include "checkpoint/dtype_table.h"
#include "checkpoint/file_io.h"
#include "checkpoint/safetensors.h"

namespace fsdpp::dcp {
namespace {

using nlohmann::json;
constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's reference implementation

/// Parses the header; a key that comes twice in one object is an error (plain parsing would keep the last).
json parse_json(const std::string& path, std::string_view text) {
  std::vector<std::set<std::string>> keys;
  auto watch = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      fail<CheckpointError>("{}: the header has the key '{}' twice", path, value.get<std::string>());
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::exception& e) {
    fail<CheckpointError>("{}: the header is not valid JSON: {}", path, e.what());
  }
}

const json& member(const std::string& path, const std::string& name, const json& object, const char* key) {
  FSDPP_ENFORCE(object.is_object() && object.contains(key), CheckpointError, "{}: tensor '{}' has no '{}' in the header", path, name,
                key);
  return object[key];
}

std::vector<uint64_t> whole_numbers(const std::string& path, const std::string& name, const json& array, const char* key) {
  std::vector<uint64_t> values;
  for (const auto& item : array.is_array() ? array : json::array({nullptr})) {
    FSDPP_ENFORCE(item.is_number_unsigned() && item.get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()}, CheckpointError,
                  "{}: tensor '{}': '{}' must be a list of whole numbers, got {}", path, name, key, array.dump());
    values.push_back(item.get<uint64_t>());
  }
  return values;
}

/// Bytes of a tensor, or nothing when they don't fit 63 bits.
std::optional<uint64_t> checked_bytes(std::span<const uint64_t> sizes, uint64_t element_bytes) {
  uint64_t total = element_bytes;
  for (auto size : sizes)
    if (__builtin_mul_overflow(total, size, &total)) return std::nullopt;
  return total;
}

TensorEntry parse_entry(const std::string& path, const std::string& name, const json& object) {
  const auto& dtype_json = member(path, name, object, "dtype");
  const auto dtype = dtype_json.is_string() ? dtype_from_name(dtype_json.get<std::string>()) : std::nullopt;
  FSDPP_ENFORCE(dtype.has_value(), CheckpointError, "{}: tensor '{}': unknown dtype {}; known are {}", path, name, dtype_json.dump(),
                dtype_names());
  const auto sizes = whole_numbers(path, name, member(path, name, object, "shape"), "shape");
  const auto offsets = whole_numbers(path, name, member(path, name, object, "data_offsets"), "data_offsets");
  FSDPP_ENFORCE(offsets.size() == 2 && offsets[0] <= offsets[1], CheckpointError,
                "{}: tensor '{}': data_offsets must be [begin, end] with begin <= end, got [{}]", path, name, fmt::join(offsets, ", "));
  const auto bytes = checked_bytes(sizes, c10::elementSize(*dtype));
  FSDPP_ENFORCE(bytes == offsets[1] - offsets[0], CheckpointError,
                "{}: tensor '{}': shape [{}] of {} needs {} bytes, but its data_offsets [{}] hold {}", path, name, fmt::join(sizes, ", "),
                dtype_json.get<std::string>(), bytes ? std::to_string(*bytes) : "more than 2^64", fmt::join(offsets, ", "),
                offsets[1] - offsets[0]);
  return {name, *dtype, {sizes.begin(), sizes.end()}, offsets[0], offsets[1]};
}

Metadata parse_metadata(const std::string& path, const json& object) {
  Metadata result;
  FSDPP_ENFORCE(object.is_object(), CheckpointError, "{}: __metadata__ must map strings to strings", path);
  for (const auto& [key, value] : object.items()) {
    FSDPP_ENFORCE(value.is_string(), CheckpointError, "{}: __metadata__ '{}' must be a string, got {}", path, key, value.dump());
    result[key] = value.get<std::string>();
  }
  return result;
}

uint64_t header_length(std::span<const std::byte> bytes) {
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
  return length;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  FSDPP_ENFORCE(fd.get() >= 0, CheckpointError, "{}: can't open: {}", path, reason(errno));
  struct stat info {};
  FSDPP_ENFORCE(::fstat(fd.get(), &info) == 0, CheckpointError, "{}: can't read its size: {}", path, reason(errno));
  FSDPP_ENFORCE(S_ISREG(info.st_mode), CheckpointError, "{}: not a regular file", path);
  if (info.st_size == 0) return;
  void* p = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd.get(), 0);
  FSDPP_ENFORCE(p != MAP_FAILED, CheckpointError, "{}: can't map {} bytes: {}", path, info.st_size, reason(errno));
  data_ = static_cast<const std::byte*>(p);
  size_ = static_cast<size_t>(info.st_size);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);  // NOLINT: munmap takes void*
}

SafetensorsReader::SafetensorsReader(const std::string& path) : path_(path), file_(path) {
  const auto bytes = file_.bytes();
  FSDPP_ENFORCE(bytes.size() >= kLengthBytes, CheckpointError,
                "{}: {} bytes long; a safetensors file starts with 8 bytes of header length", path, bytes.size());
  const auto length = header_length(bytes);
  FSDPP_ENFORCE(length <= bytes.size() - kLengthBytes, CheckpointError,
                "{}: the header should be {} bytes long, but only {} follow: truncated, or not a safetensors file", path, length,
                bytes.size() - kLengthBytes);
  FSDPP_ENFORCE(length <= kMaxHeaderBytes, CheckpointError, "{}: the header is {} bytes long; at most {} are allowed", path, length,
                kMaxHeaderBytes);
  data_start_ = kLengthBytes + length;
  parse_header({reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length});
  check_coverage();
}

void SafetensorsReader::parse_header(std::string_view text) {
  const auto header = parse_json(path_, text);
  FSDPP_ENFORCE(header.is_object(), CheckpointError, "{}: the header must be a JSON object", path_);
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__")
      metadata_ = parse_metadata(path_, value);
    else
      entries_.push_back(parse_entry(path_, name, value));
  }
  std::stable_sort(entries_.begin(), entries_.end(),
                   [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  for (size_t i = 0; i < entries_.size(); ++i) index_[entries_[i].name] = i;
}

void SafetensorsReader::check_coverage() const {
  const uint64_t available = file_.bytes().size() - data_start_;
  uint64_t position = 0;
  for (const auto& e : entries_) {
    FSDPP_ENFORCE(e.end <= available, CheckpointError,
                  "{}: tensor '{}' ends at byte {} of the data, but the file has only {}: truncated?", path_, e.name, e.end, available);
    FSDPP_ENFORCE(e.begin == position, CheckpointError, "{}: tensor '{}' starts at byte {} of the data, expected {}: {}", path_, e.name,
                  e.begin, position, e.begin < position ? "it overlaps the tensor before it" : "there is a hole before it");
    position = e.end;
  }
  FSDPP_ENFORCE(position == available, CheckpointError, "{}: the tensors end at byte {} of the data, but the file has {}", path_, position,
                available);
}

const TensorEntry* SafetensorsReader::find(const std::string& name) const noexcept {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &entries_[it->second];
}

std::span<const std::byte> SafetensorsReader::data(const TensorEntry& entry) const noexcept {
  return file_.bytes().subspan(data_start_ + entry.begin, entry.bytes());
}

}  // namespace fsdpp::dcp
