#include "tokens.h"

#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "fsdpp/base/error.h"
#include "text.h"

namespace minillm {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kWideBytes = 2;  // of a token in a .bin file
constexpr uintmax_t kHeaderBytes = 4 << 20;

[[noreturn]] void fail_with_errno(const std::string& path, const char* what) {
  throw fsdpp::ConfigError(text("--data ", path, ": ", what, ": ", std::generic_category().message(errno)));
}

/// The include folder beside the LibTorch that this process has loaded, or an empty path.
fs::path loaded_include_folder() {
  fs::path library;
  auto look = [](dl_phdr_info* info, size_t, void* found) {
    const fs::path path = info->dlpi_name;
    if (path.filename().string().rfind("libtorch_cpu.so", 0) != 0) return 0;
    *static_cast<fs::path*>(found) = path;
    return 1;
  };
  ::dl_iterate_phdr(look, &library);
  return library.empty() ? fs::path{} : library.parent_path().parent_path() / "include";
}

std::vector<std::string> sorted_headers(const fs::path& include) {
  std::vector<std::string> headers;
  for (const char* folder : {"c10", "ATen/core", "ATen/native", "torch/csrc/api"}) {
    std::error_code absent;
    for (const auto& entry : fs::recursive_directory_iterator(include / folder, absent))
      if (entry.is_regular_file() && entry.path().extension() == ".h" && entry.file_size() > 0) headers.push_back(entry.path().string());
  }
  std::sort(headers.begin(), headers.end());
  uintmax_t bytes = 0;
  const auto enough = std::find_if(headers.begin(), headers.end(), [&](const auto& path) { return (bytes += fs::file_size(path)) > kHeaderBytes; });
  headers.erase(enough, headers.end());
  return headers;
}

}  // namespace

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail_with_errno(path_, "can't open");
  struct stat info {};
  const bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  void* mapped = MAP_FAILED;
  if (regular && info.st_size > 0) mapped = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (!regular) throw fsdpp::ConfigError(text("--data ", path_, ": not a regular file"));
  if (info.st_size == 0) return;
  errno = error;
  if (mapped == MAP_FAILED) fail_with_errno(path_, "can't map into memory");
  data_ = static_cast<const std::byte*>(mapped);
  size_ = static_cast<size_t>(info.st_size);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

TokenFiles::TokenFiles(const std::vector<std::string>& paths, int64_t vocab) : vocab_(vocab) {
  if (paths.empty()) throw fsdpp::ConfigError("--data: no file given");
  for (const auto& path : paths) {
    Part part;
    part.file = std::make_unique<MappedFile>(path);
    part.wide = fs::path(path).extension() == ".bin";
    const auto bytes = static_cast<int64_t>(part.file->bytes().size());
    if (part.wide && bytes % kWideBytes != 0)
      throw fsdpp::ConfigError(text("--data ", path, ": a .bin file holds 2-byte tokens, but it is ", bytes, " bytes long"));
    part.begin = total_;
    part.end = total_ += part.wide ? bytes / kWideBytes : bytes;
    parts_.push_back(std::move(part));
  }
}

void TokenFiles::read(int64_t start, std::span<int64_t> out) const {
  auto part = std::upper_bound(parts_.begin(), parts_.end(), start, [](int64_t position, const Part& p) { return position < p.end; });
  while (!out.empty()) {
    const auto count = static_cast<size_t>(std::min<int64_t>(part->end - start, static_cast<int64_t>(out.size())));
    read_part(*part, start - part->begin, out.first(count));
    out = out.subspan(count);
    start += static_cast<int64_t>(count);
    ++part;
  }
}

void TokenFiles::read_part(const Part& part, int64_t offset, std::span<int64_t> out) const {
  const auto* bytes = reinterpret_cast<const uint8_t*>(part.file->bytes().data());
  for (size_t i = 0; i < out.size(); ++i) {
    const auto at = static_cast<size_t>(offset) + i;
    out[i] = part.wide ? bytes[2 * at] | (bytes[2 * at + 1] << 8) : bytes[at];
    if (out[i] >= vocab_)
      throw fsdpp::ConfigError(text("--data ", part.file->path(), ": token ", at, " is ", out[i], ", but --vocab is ", vocab_,
                                    ". Try: --vocab ", out[i] + 1, " or more"));
  }
}

std::vector<std::string> libtorch_headers() {
  const fs::path built = MINILLM_TORCH_INCLUDE, loaded = loaded_include_folder();
  for (const auto& folder : {built, loaded})
    if (auto headers = sorted_headers(folder); !folder.empty() && !headers.empty()) return headers;
  throw fsdpp::ConfigError(text("no --data given, and LibTorch's headers are neither in ", built, " nor in ", loaded,
                                ". Try: --data FILE or --data synthetic"));
}

}  // namespace minillm
