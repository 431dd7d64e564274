#pragma once
// Token sources. Errors are fsdpp::ConfigError.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace minillm {

/// A file mapped read-only into memory.
class MappedFile {
 public:
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// Files as one sequence of tokens, in the order given. `.bin`: raw little-endian uint16 token ids. Any other file: its bytes
/// are the tokens. Every token must be < vocab; checked when it is read. Reading is thread-safe.
class TokenFiles {
 public:
  /// Throws for no files, a file that can't be mapped, a `.bin` of odd length.
  TokenFiles(const std::vector<std::string>& paths, int64_t vocab);

  /// Tokens of all files together.
  [[nodiscard]] int64_t size() const noexcept { return total_; }
  /// Copies tokens [start, start + out.size()). REQUIRES: in range. Throws, naming file, position in it and value, for a token
  /// that is not < vocab.
  void read(int64_t start, std::span<int64_t> out) const;

 private:
  struct Part {
    std::unique_ptr<MappedFile> file;
    int64_t begin = 0, end = 0;  // of its tokens in the sequence
    bool wide = false;           // uint16, else bytes
  };
  void read_part(const Part& part, int64_t offset, std::span<int64_t> out) const;

  std::vector<Part> parts_;
  int64_t total_ = 0;
  int64_t vocab_;
};

/// Text that every machine with LibTorch has: LibTorch's own C++ headers, sorted, up to a few megabytes. The same list on every
/// machine with the same LibTorch. Looks in the folder known from the build, then beside the LibTorch library in use.
/// Throws, naming both, if there is neither.
[[nodiscard]] std::vector<std::string> libtorch_headers();

}  // namespace minillm
