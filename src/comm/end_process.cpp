#include "comm/end_process.h"

#include <unistd.h>

#include "fsdpp/base/log.h"
#include "fsdpp/comm/world.h"

namespace fsdpp::comm {

void end_process(std::string_view why) noexcept {
  log::error(why);
  report_failure(why);
  ::_exit(1);
}

}  // namespace fsdpp::comm
