#include "report.h"

#include <unistd.h>

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "fsdpp/base/error.h"
#include "text.h"

namespace minillm {
namespace {

std::string fixed(double value, int digits) { return text(std::fixed, std::setprecision(digits), value); }

template <class T>
nlohmann::json or_null(const std::optional<T>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

}  // namespace

std::string metrics_line(const StepRecord& record, std::optional<double> mfu) {
  const nlohmann::ordered_json object = {{"step", record.step},
                                         {"loss", record.loss},
                                         {"grad_norm", or_null(record.grad_norm)},
                                         {"step_ms", record.seconds * 1e3},
                                         {"tokens_per_s", record.tokens / record.seconds},
                                         {"mfu", or_null(mfu)},
                                         {"peak_bytes", record.peak_bytes}};
  return object.dump();
}

Report::Report(ReportOptions options) : options_(std::move(options)), terminal_(options_.enabled && ::isatty(STDOUT_FILENO) == 1) {
  if (!options_.enabled || options_.metrics.empty()) return;
  metrics_.open(options_.metrics, std::ios::trunc);
  if (!metrics_) throw fsdpp::ConfigError(text("--metrics ", options_.metrics, ": can't open the file for writing"));
}

void Report::line(const std::string& content) {
  if (!options_.enabled) return;
  clear_bar();
  std::cout << content << std::endl;
}

bool Report::wants(int64_t step) const noexcept {
  return !options_.metrics.empty() || step % options_.log_every == 0 || step + 1 == options_.steps;
}

void Report::step(const StepRecord& record) {
  if (!first_) first_ = record;
  else {
    seconds_ += record.seconds;
    tokens_ += record.tokens;
  }
  last_ = record;
  if (!options_.enabled) return;
  if (metrics_.is_open()) write_metrics(record);
  if (record.step % options_.log_every == 0 || record.step + 1 == options_.steps)
    line(text("Step ", record.step, " | Loss: ", fixed(record.loss, 4), options_.cuda ? " | Peak VRAM/GPU: " : " | Peak RSS: ",
              fixed(static_cast<double>(record.peak_bytes) / 1e9, 2), " GB"));
  draw_bar(record.step + 1);
}

std::optional<double> Report::utilisation(const StepRecord& record) const {
  if (!options_.peak_flops) return std::nullopt;
  return options_.flops_per_token * record.tokens / record.seconds / (*options_.peak_flops * options_.world_size);
}

void Report::write_metrics(const StepRecord& record) {
  metrics_ << metrics_line(record, utilisation(record)) << std::endl;
  if (!metrics_) throw fsdpp::ConfigError(text("--metrics ", options_.metrics, ": can't write"));
}

void Report::summary() {
  if (!options_.enabled || !last_) return;
  clear_bar();
  const bool steady = seconds_ > 0;
  StepRecord mean = *last_;
  mean.seconds = steady ? seconds_ : first_->seconds;
  mean.tokens = steady ? tokens_ : first_->tokens;
  const auto mfu = utilisation(mean);
  line(text("Done: ", last_->step + 1, " steps on ", options_.world_size, options_.world_size == 1 ? " rank" : " ranks", " | Loss: ",
            fixed(first_->loss, 4), " -> ", fixed(last_->loss, 4), " | ", fixed(mean.tokens / mean.seconds, 0), " tokens/s",
            mfu ? text(" | MFU: ", fixed(100 * *mfu, 1), " %") : "", steady ? " (without the first step)" : ""));
}

void Report::draw_bar(int64_t done) {
  constexpr int64_t kWidth = 40;
  if (!terminal_ || options_.steps == 0 || done == options_.steps) return;
  const auto filled = kWidth * done / options_.steps;
  std::cout << "\r[" << std::string(static_cast<size_t>(filled), '#') << std::string(static_cast<size_t>(kWidth - filled), ' ') << "] "
            << done << "/" << options_.steps << std::flush;
  bar_drawn_ = true;
}

void Report::clear_bar() {
  if (std::exchange(bar_drawn_, false)) std::cout << "\r\033[K";
}

}  // namespace minillm
