#pragma once
#include <string_view>

namespace fsdpp::comm {

/// The last resort of a communicator whose device waits for ever and can't be made to stop: logs `why`, tells the launcher, and ends the
/// process with exit code 1 at once, without destructors, which would wait for the device.
[[noreturn]] void end_process(std::string_view why) noexcept;

}  // namespace fsdpp::comm
