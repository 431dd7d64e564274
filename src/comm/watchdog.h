#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/failure.h"
#include "fsdpp/comm/world.h"

namespace fsdpp::comm {

/// How far one rank is on one communicator; published with its heartbeat, read by others for their reports.
struct Progress {
  uint64_t issued = 0;      ///< operations issued so far
  std::string last_issued;  ///< "all_gather #11 'layers.6 forward'", or empty
  std::string last_text;    ///< its describe() text
  uint64_t oldest = 0;      ///< sequence of the oldest operation that is not complete (== issued: none)
  std::string oldest_text;  ///< its describe() text, or empty
  bool oldest_started = false;

  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<Progress> decode(const std::string& text);
};

/// One rank's last sign of life as another rank sees it.
struct Peer {
  enum class Life { Unknown, Alive, Left, Dead };
  Life life = Life::Unknown;
  double age_s = 0;                               ///< since its heartbeat last changed, as seen here
  std::map<std::string, Progress> communicators;  ///< by key
};

class Watchdog;

/// A communicator under watch. Methods are called on the watchdog's thread.
class Watched {
 public:
  virtual ~Watched() = default;
  [[nodiscard]] virtual const std::string& key() const noexcept = 0;
  /// Looks for failures without blocking; reports them to `dog`.
  virtual void poll(Watchdog& dog) = 0;
  [[nodiscard]] virtual Progress progress() const = 0;
  /// Makes the communicator fail with the job's first failure. Bounded in time.
  virtual void fail(CommErrc code, const std::string& text) noexcept = 0;
};

/// One thread for each process: polls the communicators, keeps this rank's heartbeat in the store, looks at its
/// neighbour's, and spreads the first failure of the job to every rank, so that all end with the same message.
class Watchdog {
 public:
  struct Options {
    std::chrono::milliseconds tick{100};
    std::chrono::milliseconds heartbeat{500};
    std::chrono::milliseconds dead_after{30000};  ///< 0: heartbeats are not judged
  };
  Watchdog(std::shared_ptr<Store> store, int rank, int size, Options options);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void watch(std::weak_ptr<Watched> communicator);
  /// Makes the job fail: every rank's communicators fail with the first such call's text. Thread-safe.
  void report(CommErrc code, const std::string& text) noexcept;
  /// Throws the job's failure if there is one.
  void check() const { failure_.check(); }
  [[nodiscard]] bool failed() const noexcept { return failure_.failed(); }

  /// Reads a rank's heartbeat now (for reports; on the watchdog's thread).
  [[nodiscard]] Peer peer(int rank);

 private:
  using Clock = std::chrono::steady_clock;
  struct Seen {
    std::string value;
    Clock::time_point since{};
  };
  void loop();
  void tick();
  void beat(const std::vector<std::shared_ptr<Watched>>& all);
  void judge_neighbour();
  void look_for_failure();
  void spread();
  void store_lost(const std::string& text);
  std::vector<std::shared_ptr<Watched>> living();

  std::shared_ptr<Store> store_;
  const int rank_, size_;
  const Options options_;
  Failure failure_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::weak_ptr<Watched>> watched_;
  bool stop_ = false;
  Clock::time_point next_beat_{};
  uint64_t beats_ = 0;
  std::map<int, Seen> seen_;  // the thread's own
  std::thread thread_;
};

}  // namespace fsdpp::comm
