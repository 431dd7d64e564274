#pragma once
#include <string>
#include <string_view>

#include "fsdpp/base/export.h"

/// Slurm's compressed lists. Both throw ConfigError naming `variable` when the text is malformed.
namespace fsdpp::slurm {

/// The first host of "gpu[01-04,7],login": "gpu01".
[[nodiscard]] FSDPP_API std::string first_host(std::string_view node_list, const char* variable);

/// Tasks on node number `node` by "8(x2),4": 8, 8, 4.
[[nodiscard]] FSDPP_API int tasks_on_node(std::string_view tasks_per_node, int node, const char* variable);

}  // namespace fsdpp::slurm
