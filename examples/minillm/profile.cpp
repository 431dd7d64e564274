#include "profile.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/profiler/report.h"
#include "text.h"

namespace minillm {
namespace {

using fsdpp::profiler::Trace;

/// Every rank's bytes, by an all-gather of equal parts: the length, then the bytes, then nothing.
std::vector<std::string> gather_bytes(const Place& place, const std::string& mine) {
  if (place.world_size == 1) return {mine};
  auto& comm = place.mesh->reduce_comm();
  const auto stream = fsdpp::cuda::current_stream(place.device);
  auto longest = at::full({1}, static_cast<int64_t>(mine.size()), at::TensorOptions().dtype(at::kLong).device(place.device));
  const fsdpp::comm::Buffer length{longest.data_ptr(), 1, at::kLong};
  comm.all_reduce(length, length, fsdpp::comm::ReduceOp::Max, stream, {"profile length", {}}).wait(stream);
  const int64_t part = longest.item<int64_t>() + 8;
  auto host = at::empty({part}, at::kByte);
  const auto size = static_cast<uint64_t>(mine.size());
  std::memcpy(host.data_ptr(), &size, 8);
  std::memcpy(host.data_ptr<uint8_t>() + 8, mine.data(), mine.size());
  const auto in = host.to(place.device);
  auto out = at::empty({part * place.world_size}, in.options());
  comm.all_gather({out.data_ptr(), out.numel(), at::kByte}, {in.data_ptr(), part, at::kByte}, stream, {"profile", {}}).wait(stream);
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

std::string all_tables(const fsdpp::profiler::Profiler& profiler) {
  using fsdpp::profiler::GroupBy;
  return text("By operator and kernel\n", profiler.key_averages().table("cuda_time_total", 40), "\nBy unit\n",
              profiler.key_averages(GroupBy::Unit).table("cuda_time_total", 40), "\nBy shape\n",
              profiler.key_averages(GroupBy::Shape).table("cuda_time_total", 40));
}

}  // namespace

fsdpp::profiler::Schedule profile_schedule(int64_t steps) {
  const int64_t active = std::clamp<int64_t>(steps, 1, 3);
  const int64_t before = std::clamp<int64_t>(steps - active, 0, 5);
  const int64_t warmup = std::min<int64_t>(before, 1);
  return {.wait = before - warmup, .warmup = warmup, .active = active, .repeat = 1};
}

Profile::Profile(const Options& options, const Place& place) : options_(options), place_(place) {
  if (options.profile.empty() || options.steps == 0) return;
  std::error_code error;
  std::filesystem::create_directories(options.profile, error);
  if (!std::filesystem::is_directory(options.profile))
    throw fsdpp::ConfigError(text("--profile ", options.profile, ": not a folder, and none can be made there: ", error.message()));
  fsdpp::profiler::Options how;
  how.record_shapes = how.with_flops = how.profile_memory = true;
  how.schedule = fsdpp::profiler::Options::by(profile_schedule(options.steps));
  if (!options.cuda) how.activities = {fsdpp::profiler::Activity::Cpu};
  profiler_ = std::make_unique<fsdpp::profiler::Profiler>(how);
  profiler_->add_metadata("program", std::string("minillm"));
  profiler_->add_metadata("batch", options.batch);
  profiler_->add_metadata("seq", options.seq);
  profiler_->add_metadata("layers", options.model.layers);
  profiler_->add_metadata("dim", options.model.dim);
}

void Profile::start() {
  if (profiler_) profiler_->start();
}

void Profile::step() {
  if (profiler_) profiler_->step();
}

std::string Profile::finish() {
  if (!profiler_) return {};
  profiler_->stop();
  const auto ranks = fsdpp::profiler::gather_traces(profiler_->trace(), [this](const std::string& mine) { return gather_bytes(place_, mine); });
  if (ranks.empty()) return {};
  const std::string folder = options_.profile + "/";
  fsdpp::profiler::export_chrome_trace(folder + "trace.json.gz", ranks);
  fsdpp::profiler::write_report(folder + "report.html", ranks);
  write_text(folder + "table.txt", all_tables(*profiler_));
  std::string said = text("Profile of ", ranks[0].steps.size(), " steps in ", folder, ": trace.json.gz, report.html, table.txt");
  for (const Trace& rank : ranks)
    for (const std::string& error : rank.audit.errors) said += text("\nprofile of rank ", rank.rank, ": ", error);
  return said;
}

}  // namespace minillm
