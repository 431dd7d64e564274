#pragma once
#include <atomic>
#include <cstdint>
#include <string_view>

#include "fsdpp/base/export.h"

/// Named scopes that the engine opens around its work. Without a listener a scope costs one atomic load.
namespace fsdpp::trace {

enum class Kind { Unshard, Reshard, Reduce, PreForward, PostForward, PreBackward, PostBackward, Optimizer, Loader, User };

struct Event {
  Kind kind = Kind::User;
  std::string_view name;  ///< unit or user name; valid during the call only
  int64_t bytes = 0;      ///< bytes moved, where known
};

/// Receives scopes on the thread that opens them. Must not throw.
class FSDPP_API Listener {
 public:
  virtual ~Listener() = default;
  virtual void begin(const Event& event) noexcept = 0;
  virtual void end(const Event& event) noexcept = 0;
};

/// Installs `listener` (nullptr: none) for this process, or for the calling thread only. The caller keeps it alive.
FSDPP_API void set_listener(Listener* listener, bool for_this_thread = false) noexcept;
[[nodiscard]] FSDPP_API Listener* listener() noexcept;

class Scope {
 public:
  Scope(Kind kind, std::string_view name, int64_t bytes = 0) noexcept : event_{kind, name, bytes}, listener_(listener()) {
    if (listener_) [[unlikely]] listener_->begin(event_);
  }
  ~Scope() {
    if (listener_) [[unlikely]] listener_->end(event_);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  Event event_;
  Listener* listener_;
};

}  // namespace fsdpp::trace
