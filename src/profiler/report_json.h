#pragma once
#include <nlohmann/json.hpp>

#include "fsdpp/profiler/report.h"

namespace fsdpp::profiler {

using Json = nlohmann::ordered_json;

inline double ms(double ns) { return ns * 1e-6; }
inline double ms(int64_t ns) { return static_cast<double>(ns) * 1e-6; }
/// The value, or null.
inline Json or_null(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

[[nodiscard]] Json timeline_json(const Analysis& analysis, int columns);
[[nodiscard]] Json memory_json(const MemoryTimeline& memory, int64_t start_ns);
[[nodiscard]] Json audit_json(const Trace& trace);
[[nodiscard]] Json kernels_json(std::span<const KernelLight> kernels, const Analysis& analysis,
                                const Ceilings& ceilings);

/// Parts of the page.
[[nodiscard]] const char* report_style() noexcept;
[[nodiscard]] const char* report_script_charts() noexcept;
[[nodiscard]] const char* report_script_page() noexcept;

}  // namespace fsdpp::profiler
