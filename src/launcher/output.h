#pragma once
#include <string>
#include <string_view>

namespace fsdpp::launcher {

/// Cuts one stream of one rank into lines and writes each, in one piece, after a prefix. A line ends at '\n', at "\r\n"
/// or at a lone '\r' (progress bars); a longer one than kMaxLine is written in parts.
class LineWriter {
 public:
  static constexpr size_t kMaxLine = 64 * 1024;

  LineWriter(int fd, std::string prefix) : fd_(fd), prefix_(std::move(prefix)) {}
  void feed(std::string_view bytes);
  /// Writes what is left, with the missing newline.
  void finish();
  /// The last line that was not blank, without its end.
  [[nodiscard]] const std::string& last_line() const noexcept { return last_line_; }

 private:
  void emit(std::string_view line);

  int fd_;
  std::string prefix_;
  std::string pending_;
  std::string last_line_;
};

/// Writes all bytes; gives up silently when nobody reads any more.
void write_all(int fd, std::string_view bytes) noexcept;

}  // namespace fsdpp::launcher
