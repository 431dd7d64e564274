#include "checkpoint/file_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>

namespace fsdpp::dcp {

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

int write_fully(int fd, std::span<const std::byte> data, uint64_t offset) noexcept {
  while (!data.empty()) {
    const auto n = ::pwrite(fd, data.data(), data.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return EIO;
    data = data.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return 0;
}

int sync_folder_of(const std::string& path) noexcept {
  auto folder = std::filesystem::path(path).parent_path();
  FileDescriptor fd(::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0) return errno;
  return ::fsync(fd.get()) == 0 ? 0 : errno;
}

}  // namespace fsdpp::dcp
