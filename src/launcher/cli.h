#pragma once
#include <optional>
#include <string>

#include "launcher/options.h"

namespace fsdpp::launcher {

/// Either options to run with, or a text to print and the status to exit with (help, version, a wrong flag).
struct CliResult {
  std::optional<LaunchOptions> options;
  std::string text;
  int exit_code = 0;
};

/// Parses `fsdpp-run [flags] [--] PROGRAM ARGS…`. Never exits, never throws for bad input.
[[nodiscard]] CliResult parse_command_line(int argc, const char* const* argv);

}  // namespace fsdpp::launcher
