#pragma once
#include <atomic>
#include <cstdint>
#include <string_view>

#include "fsdpp/base/export.h"

/// Named scopes that the engine opens around its work. Without a listener a scope costs one atomic load.
namespace fsdpp::trace {

/// Forward and Backward are spans of a unit that profilers derive from the moments before and after them.
enum class Kind { Unshard, Reshard, Reduce, PreForward, PostForward, PreBackward, PostBackward, Optimizer, Loader, User, Forward, Backward };

struct Event {
  Kind kind = Kind::User;
  std::string_view name;  ///< unit or user name; valid during the call only
  int64_t bytes = 0;      ///< bytes moved, where known
};

/// A collective as a communicator issues it, or (`sequence` -1, op "group") the one launch of all since the group was opened.
struct CollectiveEvent {
  std::string_view comm;   ///< name of the communicator; valid during the call only, as op and label
  std::string_view op;     ///< "all_gather"
  std::string_view label;  ///< unit or purpose
  int64_t sequence = 0;    ///< equal on all ranks
  int64_t bytes = 0;       ///< of the full buffer
  bool in_group = false;   ///< launched when the group ends
};

/// Receives scopes on the thread that opens them. Must not throw.
class FSDPP_API Listener {
 public:
  virtual ~Listener() = default;
  virtual void begin(const Event& event) noexcept = 0;
  virtual void end(const Event& event) noexcept = 0;
  /// Around the call that issues a collective.
  virtual void begin(const CollectiveEvent&) noexcept {}
  virtual void end(const CollectiveEvent&) noexcept {}
};

/// Installs `listener` (nullptr: none) for this process, or for the calling thread only. The caller keeps it alive.
FSDPP_API void set_listener(Listener* listener, bool for_this_thread = false) noexcept;
[[nodiscard]] FSDPP_API Listener* listener() noexcept;

/// Tells the listener of the moment it was made about begin and end.
template <class E>
class Span {
 public:
  explicit Span(const E& event) noexcept : event_(event), listener_(listener()) {
    if (listener_) [[unlikely]] listener_->begin(event_);
  }
  ~Span() {
    if (listener_) [[unlikely]] listener_->end(event_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  E event_;
  Listener* listener_;
};

class Scope : public Span<Event> {
 public:
  Scope(Kind kind, std::string_view name, int64_t bytes = 0) noexcept : Span(Event{kind, name, bytes}) {}
};
using CollectiveScope = Span<CollectiveEvent>;

/// "Unshard", "Reshard", …
[[nodiscard]] FSDPP_API const char* name_of(Kind kind) noexcept;

}  // namespace fsdpp::trace
