#include "fsdpp/profiler/step_counters.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/enforce.h"
#include "profiler/device_source.h"

namespace fsdpp::profiler {
namespace {

class CuptiCounterDevice final : public CounterDevice {
 public:
  explicit CuptiCounterDevice(int device) : device_(device) {}
  std::unique_ptr<RangeCounters> open(const CounterRequest& request, int max_kernels) override {
    return open_range_counters(device_, request, max_kernels);
  }
  void watch_launches() override { log_launches(true); }
  std::vector<std::string> launches() override {
    log_launches(false);
    return logged_launches();
  }

 private:
  int device_;
};

bool all_named(const std::vector<std::string>& names) {
  return std::none_of(names.begin(), names.end(), [](const std::string& n) { return n.empty(); });
}

/// Names for so many ranges: of the counted step itself, else of the traced one.
std::vector<std::string> names_of(size_t ranges, std::vector<std::string> launched, const Trace& traced) {
  if (launched.size() == ranges && all_named(launched)) return launched;
  return launch_order(traced, main_device(traced));
}

}  // namespace

CounterDevice::~CounterDevice() = default;

std::string gpu_identity(int device) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return "";
  auto* const get = reinterpret_cast<int (*)(int*, int)>(dlsym(driver, "cuDeviceGet"));
  auto* const uuid_of = reinterpret_cast<int (*)(char*, int)>(dlsym(driver, "cuDeviceGetUuid_v2"));
  std::array<char, 16> uuid{};
  int handle = 0;
  if (get == nullptr || uuid_of == nullptr || get(&handle, device) != 0 || uuid_of(uuid.data(), handle) != 0) return "";
  std::array<char, 256> host{};
  static_cast<void>(gethostname(host.data(), host.size() - 1));
  return std::string(host.data()) + "/" + std::string(uuid.data(), uuid.size());
}

std::unique_ptr<CounterDevice> cupti_counter_device(int device) { return std::make_unique<CuptiCounterDevice>(device); }

StepCounters::StepCounters(std::unique_ptr<CounterDevice> device, const Trace& traced, CounterOptions options)
    : device_(std::move(device)), traced_(traced), options_(std::move(options)) {
  FSDPP_ENFORCE(options_.world_size <= 1 || options_.everywhere, UsageError,
                "StepCounters: expected `everywhere` with {} ranks, got none: ranks must count the same steps",
                options_.world_size);
  if (!everywhere(options_.forbidden.empty())) {
    done_ = true;
    reason_ = options_.forbidden.empty() ? "another rank must not count" : options_.forbidden;
    return;
  }
  open_set();
}

StepCounters::~StepCounters() { close(); }

void StepCounters::close() {
  if (counting_) static_cast<void>(device_->launches());
  counting_ = false;
  ranges_.reset();
}

/// Does the part, unless one of this set has failed before. True if all went well on every rank.
bool StepCounters::attempt(const std::function<void()>& part) {
  try {
    if (failure_.empty()) part();
  } catch (const std::exception& e) {
    failure_ = e.what();
  }
  return everywhere(failure_.empty());
}

/// The next set that is open on every rank, if there is one.
void StepCounters::open_set() {
  const auto kernels = std::clamp<int64_t>(2 * std::ssize(traced_.kernels), 128, 200'000);
  const CounterRequest request{"", 1, true, options_.world_size, std::ssize(traced_.collectives)};
  while (!done_ && set_ < options_.sets.size()) {
    failure_.clear();
    CounterRequest mine = request;
    mine.set = options_.sets[set_];
    if (attempt([&] { ranges_ = device_->open(mine, static_cast<int>(kernels)); })) return;
    give_up_set();
  }
  done_ = true;
}

/// Without the verdict's set there is nothing to tell; another one is only missed.
void StepCounters::give_up_set() {
  close();
  const std::string why = failure_.empty() ? "another rank could not" : failure_;
  if (set_ == 0) {
    reason_ = why;
    done_ = true;
  } else {
    notes_.push_back(options_.sets[set_] + " was not counted: " + why);
  }
  ++set_;
}

void StepCounters::begin_step() {
  FSDPP_ENFORCE(!done_, UsageError,
                "StepCounters::begin_step: expected a set to count, got none. Try: while (!done())");
  counting_ = true;
  device_->watch_launches();
  try {
    ranges_->begin_step();
  } catch (const std::exception& e) {
    failure_ = e.what();  // the other ranks hear of it after the step
  }
}

void StepCounters::end_step() {
  FSDPP_ENFORCE(counting_, UsageError,
                "StepCounters::end_step: expected a step that began, got none. Try: begin_step()");
  bool complete = false;
  const bool good = attempt([&] { complete = ranges_->end_step(); });
  std::vector<std::string> launched = device_->launches();
  counting_ = false;
  if (good && !everywhere(complete)) return;  // a further pass
  if (good && attempt([&] { join_set(std::move(launched)); })) {
    close();
    ++set_;
  } else {
    give_up_set();
  }
  open_set();
}

void StepCounters::join_set(std::vector<std::string> launched) {
  const std::vector<CounterValues> ranges = ranges_->ranges();
  if (ranges_->dropped() > 0)
    notes_.push_back(options_.sets[set_] + ": " + std::to_string(ranges_->dropped()) + " ranges were dropped");
  if (!launched.empty() && launched.size() != ranges.size())
    notes_.push_back(options_.sets[set_] + ": " + std::to_string(ranges.size()) + " ranges for " +
                     std::to_string(launched.size()) + " launches, so named by the traced step");
  merge_counters(by_kernel_, join_ranges(ranges, names_of(ranges.size(), std::move(launched), traced_)));
}

Counters StepCounters::take() {
  close();
  if (!done_ && by_kernel_.empty()) reason_ = "the training ended before a set was counted";
  done_ = true;
  const bool usable = !by_kernel_.empty();
  if (!usable && reason_.empty()) reason_ = "the counted steps launched no kernel";
  Counters out{
      {{Source::Measured, usable, usable ? "" : reason_}}, Source::Measured, std::move(by_kernel_), std::move(notes_)};
  return out;
}

void merge_counters(CountersByKernel& to, CountersByKernel more) {
  if (to.empty()) {
    to = std::move(more);
    return;
  }
  for (auto& [kernel, occurrences] : to) {
    const auto other = more.find(kernel);
    if (other == more.end()) continue;
    occurrences.resize(std::min(occurrences.size(), other->second.size()));
    for (size_t i = 0; i < occurrences.size(); ++i) occurrences[i].merge(other->second[i]);
  }
}

std::string to_bytes(const Counters& counters) {
  nlohmann::json rungs = nlohmann::json::array();
  for (const Rung& r : counters.rungs) rungs.push_back({static_cast<int>(r.source), r.usable, r.reason});
  const nlohmann::json out{{"counters", 1},
                 {"source", static_cast<int>(counters.source)},
                 {"rungs", std::move(rungs)},
                 {"kernels", counters.by_kernel},
                 {"notes", counters.notes}};
  return out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Counters counters_from_bytes(std::string_view bytes) {
  try {
    const nlohmann::json json = nlohmann::json::parse(bytes);
    Counters out;
    out.source = static_cast<Source>(json.at("source").get<int>());
    for (const nlohmann::json& r : json.at("rungs"))
      out.rungs.push_back({static_cast<Source>(r.at(0).get<int>()), r.at(1), r.at(2)});
    out.by_kernel = json.at("kernels").get<CountersByKernel>();
    out.notes = json.at("notes").get<std::vector<std::string>>();
    return out;
  } catch (const nlohmann::json::exception& e) {
    fail<Error>("counters: expected what to_bytes() made of them, got other bytes ({})", e.what());
  }
}

}  // namespace fsdpp::profiler
