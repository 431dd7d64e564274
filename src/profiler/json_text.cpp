#include "profiler/json_text.h"

#include <charconv>
#include <cmath>
#include <cstdio>

namespace fsdpp::profiler {
namespace {

/// Bytes of the UTF-8 character at the start of `text`, or 0 when it is not one (overlong, surrogate, too large, cut).
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  const unsigned second = byte(1);
  if (first == 0xE0 && second < 0xA0) return 0;
  if (first == 0xED && second > 0x9F) return 0;
  if (first == 0xF0 && second < 0x90) return 0;
  if (first == 0xF4 && second > 0x8F) return 0;
  return length;
}

void append_ascii(std::string& out, char c) {
  switch (c) {
    case '"': out += "\\\""; return;
    case '\\': out += "\\\\"; return;
    case '\n': out += "\\n"; return;
    case '\r': out += "\\r"; return;
    case '\t': out += "\\t"; return;
    default: break;
  }
  if (static_cast<unsigned char>(c) >= 0x20 && c != 0x7F) {
    out += c;
    return;
  }
  char escaped[8];
  std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
  out += escaped;
}

}  // namespace

bool append_json_string(std::string& out, std::string_view text) {
  bool replaced = false;
  out += '"';
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length == 1) {
      append_ascii(out, text[0]);
    } else if (length > 1) {
      out += text.substr(0, length);
    } else {
      out += "\xEF\xBF\xBD";
      replaced = true;
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  out += '"';
  return replaced;
}

void append_json_number(std::string& out, double value) {
  if (std::isnan(value)) {
    out += "\"NaN\"";
  } else if (std::isinf(value)) {
    out += value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
  } else {
    char text[40];
    out.append(text, std::to_chars(text, text + sizeof(text), value).ptr);
  }
}

void append_json_us(std::string& out, int64_t ns) {
  const bool negative = ns < 0;
  const uint64_t size = negative ? ~static_cast<uint64_t>(ns) + 1 : static_cast<uint64_t>(ns);
  char text[40];
  out.append(text, static_cast<size_t>(std::snprintf(text, sizeof(text), "%s%llu.%03u", negative ? "-" : "",
                                                     static_cast<unsigned long long>(size / 1000), static_cast<unsigned>(size % 1000))));
}

}  // namespace fsdpp::profiler
