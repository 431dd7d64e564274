#include "profiler/out_file.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/enforce.h"

namespace fsdpp::profiler {
namespace {

gzFile handle(void* file) { return static_cast<gzFile>(file); }

std::string temporary_name(const std::string& path) {
  static std::atomic<unsigned> next{0};
  return path + ".tmp." + std::to_string(getpid()) + "." + std::to_string(next++);
}

}  // namespace

OutFile::OutFile(std::string path) : path_(std::move(path)), temporary_(temporary_name(path_)) {
  const int descriptor = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) fail("can't be created");
  file_ = gzdopen(descriptor, path_.ends_with(".gz") ? "wb6" : "wbT");  // T: as it is
  if (file_ == nullptr) {
    close(descriptor);
    unlink(temporary_.c_str());
    fail("can't be opened");
  }
  gzbuffer(handle(file_), 1U << 18);
}

OutFile::~OutFile() {
  if (file_ == nullptr) return;
  gzclose(handle(file_));
  unlink(temporary_.c_str());
}

void OutFile::write(std::string_view text) {
  if (!text.empty() && gzfwrite(text.data(), 1, text.size(), handle(file_)) != text.size()) fail("can't be written");
}

void OutFile::finish() {
  const int status = gzclose(handle(file_));
  file_ = nullptr;
  if (status == Z_OK && std::rename(temporary_.c_str(), path_.c_str()) == 0) return;
  const int error = errno;
  unlink(temporary_.c_str());
  errno = error;
  fail("can't be completed");
}

void OutFile::fail(const char* what) const {
  fsdpp::fail<Error>("profiler: {} {}: {}. Try: a folder that exists and has space.", path_, what, std::strerror(errno));
}

}  // namespace fsdpp::profiler
