#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fsdpp/profiler/records.h"

namespace fsdpp::profiler {

/// A node of a CUDA graph came to be: recorded at capture (`origin` 0) or copied into an executable graph from `origin`.
struct GraphNode {
  uint64_t id = 0;
  uint64_t origin = 0;
  int64_t thread = 0;
  int64_t time_ns = 0;
};

/// What the device side of a window gave; `op` and `scope` are not filled in yet.
struct DeviceRecords {
  bool available = false;  ///< the device was traced
  int cupti_version = 0;
  int runtime_version = 0;
  int driver_version = 0;
  std::vector<Device> devices;
  std::vector<Kernel> kernels;
  std::vector<Copy> copies;
  std::vector<Runtime> runtime;
  std::vector<Sync> syncs;
  std::vector<EventRecord> events;
  std::vector<Overhead> overheads;
  std::vector<GraphNode> graph_nodes;

  std::map<int, int64_t> unknown_kinds;  ///< number of the kind, records
  int64_t truncated_buffers = 0;
  int64_t refused_buffers = 0;
  int64_t dropped_records = 0;
  std::vector<std::string> errors;  ///< failed calls and messages of CUPTI
  std::vector<std::string> notes;
};

}  // namespace fsdpp::profiler
