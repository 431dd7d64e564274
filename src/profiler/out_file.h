#pragma once
#include <string>
#include <string_view>

namespace fsdpp::profiler {

/// A file that appears under its name when finish() returns, and not at all otherwise. Compressed if the name ends in ".gz".
class OutFile {
 public:
  explicit OutFile(std::string path);
  ~OutFile();
  OutFile(const OutFile&) = delete;
  OutFile& operator=(const OutFile&) = delete;

  void write(std::string_view text);
  void finish();

 private:
  [[noreturn]] void fail(const char* what) const;

  std::string path_;
  std::string temporary_;
  void* file_ = nullptr;  // zlib's gzFile
};

}  // namespace fsdpp::profiler
