#include "profile.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/profiler/ceilings.h"
#include "fsdpp/profiler/report.h"
#include "text.h"

namespace minillm {
namespace {

namespace prof = fsdpp::profiler;
using prof::Source;
using prof::Trace;

/// Every rank's bytes, by an all-gather of equal parts: the length, then the bytes, then nothing.
std::vector<std::string> gather_bytes(const Place& place, const std::string& mine) {
  if (place.world_size == 1) return {mine};
  auto& comm = place.mesh->reduce_comm();
  const auto stream = fsdpp::cuda::current_stream(place.device);
  auto longest =
      at::full({1}, static_cast<int64_t>(mine.size()), at::TensorOptions().dtype(at::kLong).device(place.device));
  const fsdpp::comm::Buffer length{longest.data_ptr(), 1, at::kLong};
  comm.all_reduce(length, length, fsdpp::comm::ReduceOp::Max, stream, {"profile length", {}}).wait(stream);
  const int64_t part = longest.item<int64_t>() + 8;
  auto host = at::empty({part}, at::kByte);
  const auto size = static_cast<uint64_t>(mine.size());
  std::memcpy(host.data_ptr(), &size, 8);
  std::memcpy(host.data_ptr<uint8_t>() + 8, mine.data(), mine.size());
  const auto in = host.to(place.device);
  auto out = at::empty({part * place.world_size}, in.options());
  comm.all_gather({out.data_ptr(), out.numel(), at::kByte}, {in.data_ptr(), part, at::kByte}, stream, {"profile", {}})
      .wait(stream);
  std::vector<std::string> all;
  if (place.rank != 0) return all;
  const auto bytes = out.cpu();
  for (int r = 0; r < place.world_size; ++r) {
    const uint8_t* from = bytes.data_ptr<uint8_t>() + r * part;
    uint64_t n = 0;
    std::memcpy(&n, from, 8);
    all.emplace_back(reinterpret_cast<const char*>(from) + 8, n);
  }
  return all;
}

void write_text(const std::string& path, const std::string& content) {
  std::ofstream file(path);
  file << content;
  file.close();
  if (!file) throw fsdpp::Error(text("--profile: ", path, " can't be written"));
}

std::string all_tables(const prof::Profiler& profiler) {
  using prof::GroupBy;
  return text("By operator and kernel\n", profiler.key_averages().table("cuda_time_total", 40), "\nBy unit\n",
              profiler.key_averages(GroupBy::Unit).table("cuda_time_total", 40), "\nBy shape\n",
              profiler.key_averages(GroupBy::Shape).table("cuda_time_total", 40));
}

/// True where it is true on every rank.
bool everywhere(const Place& place, bool mine) {
  if (place.world_size == 1) return mine;
  const auto stream = fsdpp::cuda::current_stream(place.device);
  auto flag = at::full({1}, int64_t{mine}, at::TensorOptions().dtype(at::kLong).device(place.device));
  const fsdpp::comm::Buffer buffer{flag.data_ptr(), 1, at::kLong};
  place.mesh->reduce_comm()
      .all_reduce(buffer, buffer, fsdpp::comm::ReduceOp::Min, stream, {"profile agreement", {}})
      .wait(stream);
  return flag.item<int64_t>() != 0;
}

/// Two processes can't count on one GPU, and samples of one would be of both. Known on rank 0 alone.
std::string why_not_counting(const Place& place) {
  if (!place.device.is_cuda()) return "no GPU is used";
  const auto gpus = gather_bytes(place, prof::gpu_identity(place.device.index()));
  const std::set<std::string> different(gpus.begin(), gpus.end());
  return different.size() == gpus.size() ? "" : text(gpus.size(), " ranks share ", different.size(), " GPUs");
}

prof::Ceilings ceilings(const Place& place) {
  if (!place.device.is_cuda()) return {};
  try {
    return prof::measure_ceilings(place.device.index());
  } catch (const std::exception&) {
    return {};  // no memory left for it: the report falls back to the data sheet, and says so
  }
}

std::vector<Trace> first_step(const std::vector<Trace>& ranks) {
  std::vector<Trace> cut;
  for (const Trace& rank : ranks) cut.push_back(prof::cut_to_step(rank, rank.steps.at(0).step));
  return cut;
}

}  // namespace

fsdpp::profiler::Schedule profile_schedule(int64_t steps) {
  const int64_t active = std::clamp<int64_t>(steps, 1, 3);
  const int64_t before = std::clamp<int64_t>(steps - active, 0, 5);
  const int64_t warmup = std::min<int64_t>(before, 1);
  return {.wait = before - warmup, .warmup = warmup, .active = active, .repeat = 1};
}

Profile::Profile(const Options& options, const Place& place, KnownMemory known_memory)
    : options_(options), place_(place) {
  if (options.profile.empty() || options.steps == 0) return;
  std::error_code error;
  std::filesystem::create_directories(options.profile, error);
  if (!std::filesystem::is_directory(options.profile))
    throw fsdpp::ConfigError(
        text("--profile ", options.profile, ": not a folder, and none can be made there: ", error.message()));
  prof::Options how;
  how.record_shapes = how.with_flops = how.profile_memory = true;
  how.schedule = prof::Options::by(profile_schedule(options.steps));
  if (!options.cuda) how.activities = {prof::Activity::Cpu};
  how.known_memory = std::move(known_memory);
  how.on_trace_ready = [this](prof::Profiler&) { traced_ = true; };
  profiler_ = std::make_unique<prof::Profiler>(how);
  profiler_->add_metadata("program", std::string("minillm"));
  profiler_->add_metadata("batch", options.batch);
  profiler_->add_metadata("seq", options.seq);
  profiler_->add_metadata("layers", options.model.layers);
  profiler_->add_metadata("dim", options.model.dim);
}

void Profile::start() {
  if (!profiler_) return;
  profiler_->start();
  phase_ = Phase::Tracing;
}

void Profile::step() {
  switch (phase_) {
    case Phase::Tracing:
      profiler_->step();
      if (traced_ && options_.profile_counters) begin_counting();
      return;
    case Phase::Counting:
      counting_->end_step();
      if (counting_->done()) return end_counting();
      return counting_->begin_step();
    case Phase::Sampling:
      return end_sampling();
    case Phase::Off:
    case Phase::Over:
      return;
  }
}

void Profile::begin_counting() {
  profiler_->stop();
  const std::string forbidden = why_not_counting(place_);
  counting_ = std::make_unique<prof::StepCounters>(
      prof::cupti_counter_device(place_.device.index()), profiler_->trace(),
      prof::CounterOptions{.world_size = place_.world_size,
                           .everywhere = [this](bool mine) { return everywhere(place_, mine); },
                           .forbidden = forbidden});
  phase_ = Phase::Counting;
  if (counting_->done())
    end_counting();
  else
    counting_->begin_step();
}

/// With the next rung of the ladder, if this one does not bear.
void Profile::end_counting() {
  counters_ = counting_->take();
  counting_.reset();
  phase_ = Phase::Over;
  if (counters_.by_kernel.empty()) begin_sampling();
}

void Profile::begin_sampling() {
  if (!everywhere(place_, why_not_counting(place_).empty())) return;
  try {
    sampler_ = prof::open_pm_sampler(place_.device.index());
    beside_samples_ = std::make_unique<prof::Profiler>();
    beside_samples_->start();
    sampler_->start();
    phase_ = Phase::Sampling;
  } catch (const std::exception& e) {
    counters_.rungs.push_back({Source::Sampled, false, e.what()});
    sampler_.reset();
    beside_samples_.reset();
  }
}

void Profile::end_sampling() {
  phase_ = Phase::Over;
  try {
    const auto samples = sampler_->stop();
    beside_samples_->stop();
    auto rungs = counters_.rungs;
    rungs.push_back({Source::Sampled, true, ""});
    counters_ = prof::counters_of_samples(beside_samples_->trace(), samples, std::move(rungs));
  } catch (const std::exception& e) {
    counters_.rungs.push_back({Source::Sampled, false, e.what()});
  }
  sampler_.reset();
  beside_samples_.reset();
}

std::vector<prof::Counters> Profile::all_counters() {
  if (phase_ == Phase::Counting) counters_ = counting_->take();
  std::vector<prof::Counters> all;
  for (const std::string& bytes : gather_bytes(place_, prof::to_bytes(counters_)))
    all.push_back(prof::counters_from_bytes(bytes));
  return all;
}

std::string Profile::finish() {
  if (!profiler_) return {};
  if (phase_ == Phase::Tracing) profiler_->stop();
  if (phase_ == Phase::Sampling) end_sampling();
  prof::ReportOptions report;
  report.title = "minillm";
  if (options_.profile_counters) report.counters = all_counters();
  phase_ = Phase::Over;
  const auto ranks =
      prof::gather_traces(profiler_->trace(), [this](const std::string& mine) { return gather_bytes(place_, mine); });
  if (ranks.empty()) return {};
  report.ceilings = ceilings(place_);
  const std::string folder = options_.profile + "/";
  prof::export_chrome_trace(folder + "trace.json.gz", ranks);
  prof::export_chrome_trace(folder + "step.json.gz", first_step(ranks));
  prof::write_report(folder + "report.html", ranks, report);
  const std::string summary = prof::report_text(prof::report_json(ranks, report));
  write_text(folder + "table.txt", summary + "\n" + all_tables(*profiler_));
  std::string said = text("Profile of ", ranks[0].steps.size(), " steps in ", folder,
                          ": trace.json.gz, step.json.gz, report.html, report.json, table.txt");
  for (const auto& rank : report.counters) said += "\n" + prof::choose_source(rank.rungs).text;
  for (const Trace& rank : ranks)
    for (const std::string& error : rank.audit.errors) said += text("\nprofile of rank ", rank.rank, ": ", error);
  return said;
}

}  // namespace minillm
