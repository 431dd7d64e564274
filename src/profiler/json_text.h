#pragma once
#include <cstdint>
#include <string>
#include <string_view>

/// Strict JSON, written piece by piece.
namespace fsdpp::profiler {

/// `text` in quotes. Bytes that are not UTF-8 become U+FFFD; returns whether there were any.
bool append_json_string(std::string& out, std::string_view text);
/// The shortest form that reads back equal; NaN and infinities as the strings "NaN", "Infinity", "-Infinity".
void append_json_number(std::string& out, double value);
/// ns as µs with three decimals, exactly: -1234 → -1.234
void append_json_us(std::string& out, int64_t ns);

/// One object or array: puts the commas. `key` needs no escaping when it is one of the writer's own.
class JsonObject {
 public:
  explicit JsonObject(std::string& out) : out_(out) { out_ += '{'; }
  ~JsonObject() { out_ += '}'; }
  JsonObject(const JsonObject&) = delete;
  JsonObject& operator=(const JsonObject&) = delete;

  std::string& key(std::string_view key) {
    if (!first_) out_ += ',';
    first_ = false;
    replaced_ += append_json_string(out_, key);
    out_ += ':';
    return out_;
  }
  void text(std::string_view key, std::string_view value) { replaced_ += append_json_string(this->key(key), value); }
  void number(std::string_view key, int64_t value) { this->key(key) += std::to_string(value); }
  void real(std::string_view key, double value) { append_json_number(this->key(key), value); }
  void us(std::string_view key, int64_t ns) { append_json_us(this->key(key), ns); }
  void flag(std::string_view key, bool value) { this->key(key) += value ? "true" : "false"; }
  /// Strings so far that were not UTF-8.
  [[nodiscard]] int64_t replaced() const noexcept { return replaced_; }

 private:
  std::string& out_;
  bool first_ = true;
  int64_t replaced_ = 0;
};

}  // namespace fsdpp::profiler
