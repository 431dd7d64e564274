#pragma once
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <system_error>

namespace fsdpp::dcp {

/// Closes a file descriptor on every way out.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) noexcept : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  [[nodiscard]] int get() const noexcept { return fd_; }

 private:
  int fd_;
};

/// The system's words for an errno value.
[[nodiscard]] inline std::string reason(int error) { return std::generic_category().message(error); }

/// Writes all bytes at `offset`. Returns 0 or the errno value.
[[nodiscard]] int write_fully(int fd, std::span<const std::byte> data, uint64_t offset) noexcept;

/// Flushes the folder of `path`, so that a rename in it survives a crash. Returns 0 or the errno value.
[[nodiscard]] int sync_folder_of(const std::string& path) noexcept;

}  // namespace fsdpp::dcp
