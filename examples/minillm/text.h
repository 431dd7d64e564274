#pragma once
#include <sstream>
#include <string>

namespace minillm {

/// The arguments one after the other as text.
template <class... Args>
std::string text(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace minillm
