#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace fsdpp::launcher {

/// How a rank ended.
struct RankEnd {
  int rank = 0;
  int pid = 0;
  int signal = 0;                       ///< non-zero: ended by this signal
  int exit_code = 0;                    ///< else this code
  int64_t message_time_ns = INT64_MAX;  ///< when the error file was written; the first writer failed first
  std::string message;                  ///< from the error file, or the last line on stderr

  [[nodiscard]] bool failed() const { return signal != 0 || exit_code != 0; }
  /// What a shell would show: the code, or 128 + signal.
  [[nodiscard]] int status() const { return signal != 0 ? 128 + signal : exit_code; }
};

/// "exit code 3", "signal 11 (SIGSEGV)".
[[nodiscard]] std::string describe(const RankEnd& end);

/// Whether `a` is more likely the origin than `b` when both were seen to end at once: a signal before a code (peers of
/// a crashed rank exit with errors of their own), then the earlier message, then the lower rank.
[[nodiscard]] bool is_earlier(const RankEnd& a, const RankEnd& b);

struct ErrorMessage {
  std::string text;
  int64_t time_ns = 0;
};
/// The message in a TORCHELASTIC_ERROR_FILE, {"message": {"message": "…"}} or {"message": "…"}; a file in another form
/// gives its text. Nothing if there is no file.
[[nodiscard]] std::optional<ErrorMessage> read_error_file(const std::string& path);

}  // namespace fsdpp::launcher
