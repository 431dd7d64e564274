#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/profiler/records.h"

/// Sums over a trace: by operator and kernel name, by name and input shapes, or by unit.
namespace fsdpp::profiler {

enum class GroupBy { Name, Shape, Unit };

/// Times in ns, summed over the calls. "self" leaves out enclosed operators; "cuda" counts kernels, copies and memsets.
struct Average {
  std::string name;    ///< operator, kernel or unit
  std::string shapes;  ///< with GroupBy::Shape
  bool on_device = false;  ///< a kernel or copy: its own time is cuda time, host times are 0
  int64_t count = 0;
  int64_t cpu_total_ns = 0;  ///< calls inside a call of the same row are counted once
  int64_t cpu_self_ns = 0;
  int64_t cuda_total_ns = 0;
  int64_t cuda_self_ns = 0;
  int64_t cpu_memory = 0;  ///< bytes taken less given back
  int64_t cpu_self_memory = 0;
  int64_t cuda_memory = 0;
  int64_t cuda_self_memory = 0;
  double flops = 0;
};

class FSDPP_API KeyAverages {
 public:
  KeyAverages(std::vector<Average> rows, const Trace& trace);

  /// Text in the look of torch's table. `sort_by`: cpu_time_total, self_cpu_time_total, cpu_time, cuda_time_total,
  /// self_cuda_time_total, cuda_time, cpu_memory_usage, self_cpu_memory_usage, cuda_memory_usage, self_cuda_memory_usage,
  /// count, flops, name; `device` may stand for `cuda`. Largest first (name: a to z), equal rows by name. Empty: in order of
  /// first appearance. `row_limit` -1: all. Throws ConfigError on another key.
  [[nodiscard]] std::string table(std::string_view sort_by = "cuda_time_total", int64_t row_limit = 100) const;
  /// All rows, sorted, as a JSON array or CSV (RFC 4180) with a line of names; times in µs.
  [[nodiscard]] std::string json(std::string_view sort_by = "cuda_time_total") const;
  [[nodiscard]] std::string csv(std::string_view sort_by = "cuda_time_total") const;

  [[nodiscard]] std::vector<Average> sorted(std::string_view sort_by) const;
  [[nodiscard]] const std::vector<Average>& rows() const& noexcept { return rows_; }
  [[nodiscard]] std::vector<Average> rows() && noexcept { return std::move(rows_); }  ///< `for (… : key_averages(t).rows())`
  [[nodiscard]] int64_t cpu_time_ns() const noexcept { return cpu_time_ns_; }    ///< sum of self times
  [[nodiscard]] int64_t cuda_time_ns() const noexcept { return cuda_time_ns_; }  ///< each kernel and copy once

 private:
  std::vector<Average> rows_;
  int64_t cpu_time_ns_ = 0;
  int64_t cuda_time_ns_ = 0;
  bool memory_ = false;
  bool shapes_ = false;
  bool flops_ = false;
};

[[nodiscard]] FSDPP_API KeyAverages key_averages(const Trace& trace, GroupBy by = GroupBy::Name);

}  // namespace fsdpp::profiler
