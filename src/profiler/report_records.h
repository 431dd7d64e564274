#pragma once
#include <nlohmann/json.hpp>
#include <vector>

#include "fsdpp/profiler/records.h"

namespace fsdpp::profiler {

/// Chrome's events back to records, one trace a rank. Unknown events and fields are skipped. Throws Error for what is
/// no trace.
[[nodiscard]] std::vector<Trace> traces_from_chrome(const nlohmann::json& file);

}  // namespace fsdpp::profiler
