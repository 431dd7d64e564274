#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <utility>

#include "dry_run.h"
#include "fsdpp/base/rank_env.h"
#include "fsdpp/comm/world.h"
#include "options.h"
#include "text.h"
#include "trainer.h"

namespace {

/// Messages of the library carry their rank already once it is known.
std::string with_rank(const std::string& message) {
  if (message.rfind("[rank ", 0) == 0) return message;
  try {
    const auto env = fsdpp::detect_rank_env();
    return minillm::text("[rank ", env.rank, "/", env.world_size, "] ", message);
  } catch (const std::exception&) {
    return message;  // what the launcher set is itself wrong: that is the message
  }
}

int run(int argc, char** argv) {
  const auto options = minillm::parse_options(argc, argv);
  if (!options) return 0;
  if (options->dry_run) {
    const auto env = fsdpp::detect_rank_env();
    const auto world = options->plan_world.value_or(env.world_size);
    if (env.rank == 0) std::cout << minillm::dry_run_text(*options, static_cast<int>(world));
    return 0;
  }
  auto place = minillm::find_place(*options);
  minillm::check_outputs(*options, place);
  minillm::Trainer trainer(*options, std::move(place));
  trainer.run();
  return 0;
}

int fail(const std::string& what) {
  const auto message = with_rank(what);
  fsdpp::comm::report_failure(message);
  std::cerr << "minillm: " << message << std::endl;
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    return fail(e.what());
  } catch (...) {
    return fail("unknown error");
  }
}
