#pragma once
#include <functional>

#include "fsdpp/profiler/profiler.h"

namespace fsdpp::profiler {

/// What a session switches on and off.
class Recorder {
 public:
  virtual ~Recorder() = default;
  virtual void begin() = 0;             ///< records from here on
  virtual void mark(int64_t step) = 0;  ///< this step of the window is over
  virtual void keep() = 0;              ///< the window is complete: makes its trace
  virtual void discard() = 0;           ///< ends recording and forgets
};

/// Follows a schedule: which step begins, keeps or discards a window. Knows no clock and no device.
class Session {
 public:
  /// Without `schedule`, one window from start() to stop(). `ready` is called after every keep().
  Session(std::function<Action(int64_t)> schedule, Recorder& recorder, std::function<void()> ready);

  void start();
  void step();
  void stop();
  /// Ends without calling `ready`.
  void abandon();

  [[nodiscard]] bool running() const noexcept { return running_; }
  [[nodiscard]] int64_t step_number() const noexcept { return step_; }

 private:
  [[nodiscard]] Action action_at(int64_t step) const;
  void enter(Action next);
  void finish();

  std::function<Action(int64_t)> schedule_;
  Recorder& recorder_;
  std::function<void()> ready_;
  bool running_ = false;
  int64_t step_ = 0;
  Action action_ = Action::None;
};

}  // namespace fsdpp::profiler
