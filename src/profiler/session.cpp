#include "profiler/session.h"

#include "base/enforce.h"

namespace fsdpp::profiler {
namespace {

bool records(Action action) { return action == Action::Record || action == Action::RecordAndSave; }

}  // namespace

void Schedule::check() const {
  FSDPP_ENFORCE(wait >= 0 && warmup >= 0 && active > 0 && repeat >= 0 && skip_first >= 0, ConfigError,
                "profiler schedule: expected numbers of 0 or more and active of 1 or more, got wait {}, warmup {}, active {}, repeat {}, "
                "skip_first {}",
                wait, warmup, active, repeat, skip_first);
}

Action Schedule::action(int64_t step) const noexcept {
  const int64_t cycle = wait + warmup + active;
  step -= skip_first;
  if (step < 0 || cycle <= 0 || (repeat > 0 && step / cycle >= repeat)) return Action::None;
  const int64_t at = step % cycle;
  if (at < wait) return Action::None;
  if (at < wait + warmup) return Action::Warmup;
  return at + 1 == cycle ? Action::RecordAndSave : Action::Record;
}

std::function<Action(int64_t)> Options::by(const Schedule& schedule) {
  schedule.check();
  return [schedule](int64_t step) { return schedule.action(step); };
}

Session::Session(std::function<Action(int64_t)> schedule, Recorder& recorder, std::function<void()> ready)
    : schedule_(std::move(schedule)), recorder_(recorder), ready_(std::move(ready)) {}

Action Session::action_at(int64_t step) const { return schedule_ ? schedule_(step) : Action::Record; }

void Session::enter(Action next) {
  if (next == Action::None && action_ != Action::None) recorder_.discard();  // warmed up for nothing
  if (records(next) && action_ == Action::Warmup) recorder_.discard();
  if (records(next) != records(action_) || (next == Action::Warmup && action_ == Action::None))
    if (next != Action::None) recorder_.begin();
  action_ = next;
}

void Session::finish() {
  action_ = Action::None;
  recorder_.keep();
  if (ready_) ready_();
}

void Session::start() {
  FSDPP_ENFORCE(!running_, UsageError, "Profiler::start: it runs already. Try: stop() first.");
  step_ = 0;
  action_ = Action::None;
  enter(action_at(0));
  running_ = true;
}

void Session::step() {
  FSDPP_ENFORCE(running_, UsageError, "Profiler::step: expected a running profiler. Try: start() first.");
  if (records(action_)) recorder_.mark(step_);
  ++step_;
  const Action next = action_at(step_);
  if (action_ == Action::RecordAndSave || (action_ == Action::Record && !records(next))) finish();
  enter(next);
}

void Session::stop() {
  FSDPP_ENFORCE(running_, UsageError, "Profiler::stop: expected a running profiler. Try: start() first.");
  running_ = false;
  if (records(action_)) {
    recorder_.mark(step_);
    return finish();
  }
  enter(Action::None);
}

void Session::abandon() {
  if (!running_) return;
  running_ = false;
  if (action_ != Action::None) recorder_.discard();
  action_ = Action::None;
}

}  // namespace fsdpp::profiler
