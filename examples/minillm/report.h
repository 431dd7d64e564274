#pragma once
// What rank 0 says: lines, a progress bar on a terminal, the metrics file, the summary. Silent on other ranks.
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

namespace minillm {

/// One optimizer step, as all ranks together see it.
struct StepRecord {
  int64_t step = 0;                 ///< from 0
  double loss = 0.0;                ///< mean over ranks and micro-batches
  std::optional<double> grad_norm{};  ///< before clipping; where it was computed
  double seconds = 0.0;
  double tokens = 0.0;              ///< of all ranks
  int64_t peak_bytes = 0;           ///< largest of the ranks
};

struct ReportOptions {
  bool enabled = true;  ///< false on every rank but 0
  bool cuda = false;
  int64_t steps = 0, log_every = 1;
  int world_size = 1;
  double flops_per_token = 0.0;
  std::optional<double> peak_flops{};  ///< of one GPU
  std::string metrics{};             ///< path or empty
};

class Report {
 public:
  /// Throws fsdpp::ConfigError if the metrics file can't be opened.
  explicit Report(ReportOptions options);

  void line(const std::string& text);
  /// True if this step's loss is wanted.
  [[nodiscard]] bool wants(int64_t step) const noexcept;
  /// A step whose loss was wanted.
  void step(const StepRecord& record);
  void summary();

 private:
  [[nodiscard]] std::optional<double> utilisation(const StepRecord& record) const;
  void write_metrics(const StepRecord& record);
  void draw_bar(int64_t done);
  void clear_bar();

  ReportOptions options_;
  bool terminal_ = false, bar_drawn_ = false;
  std::ofstream metrics_;
  std::optional<StepRecord> first_, last_;
  double seconds_ = 0.0, tokens_ = 0.0;  // of all steps but the first, which warms up
};

/// The object that write_metrics writes, as one line.
[[nodiscard]] std::string metrics_line(const StepRecord& record, std::optional<double> mfu);

}  // namespace minillm
