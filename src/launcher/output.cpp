#include "launcher/output.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>

namespace fsdpp::launcher {
namespace {

// Length of the first complete line of `text`, its end included, or npos.
size_t line_length(std::string_view text) {
  const auto end = text.find_first_of("\r\n");
  if (end == std::string_view::npos) return text.size() >= LineWriter::kMaxLine ? LineWriter::kMaxLine : end;
  if (text[end] == '\n') return end + 1;
  if (end + 1 == text.size()) return std::string_view::npos;  // '\r' and then? Wait for the next byte.
  return text[end + 1] == '\n' ? end + 2 : end + 1;
}

}  // namespace

void LineWriter::feed(std::string_view bytes) {
  pending_.append(bytes);
  std::string_view rest = pending_;
  for (size_t length; (length = line_length(rest)) != std::string_view::npos;) {
    emit(rest.substr(0, length));
    rest.remove_prefix(length);
  }
  pending_.erase(0, pending_.size() - rest.size());
}

void LineWriter::finish() {
  if (!pending_.empty()) emit(pending_);
  pending_.clear();
}

void LineWriter::emit(std::string_view line) {
  std::string text = prefix_ + std::string(line);
  if (!line.ends_with('\n') && !line.ends_with('\r')) text += '\n';
  write_all(fd_, text);
  const auto last = line.find_last_not_of(" \t\r\n");
  if (last != std::string_view::npos) last_line_ = line.substr(0, last + 1);
}

void write_all(int fd, std::string_view bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd, bytes.data(), bytes.size());
    if (count >= 0) {
      bytes.remove_prefix(static_cast<size_t>(count));
    } else if (errno == EAGAIN) {
      pollfd ready{fd, POLLOUT, 0};
      ::poll(&ready, 1, 1000);
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace fsdpp::launcher
