#pragma once
// Flags that the benchmarks share.
#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "fsdpp/base/error.h"

namespace bench {

/// False after --help (the text is printed). Throws fsdpp::ConfigError for what the parser refuses.
inline bool parse(CLI::App& app, int argc, const char* const* argv) {
  try {
    app.parse(argc, argv);
    return true;
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return false;
  } catch (const CLI::ParseError& e) {
    throw fsdpp::ConfigError(app.get_name() + ": " + e.what() + ". Try: --help");
  }
}

/// --device, given as "cpu" or "cuda".
inline void add_device_flag(CLI::App& app, std::string& device) {
  app.add_option("--device", device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}))->capture_default_str();
}

}  // namespace bench
