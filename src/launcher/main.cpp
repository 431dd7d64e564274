#include <exception>
#include <string>

#include "launcher/cli.h"
#include "launcher/launch.h"
#include "launcher/output.h"

int main(int argc, char** argv) {
  using namespace fsdpp::launcher;
  const auto cli = parse_command_line(argc, argv);
  if (!cli.options) {
    write_all(cli.exit_code == 0 ? 1 : 2, cli.text);
    return cli.exit_code;
  }
  try {
    return launch(*cli.options);
  } catch (const std::exception& error) {
    write_all(2, std::string("fsdpp-run: ") + error.what() + "\n");
    return 1;
  }
}
