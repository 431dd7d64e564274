#pragma once
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <map>
#include <string>

#include "fsdpp/base/rank_env.h"
#include "fsdpp/comm/world.h"

/// How the processes of a job find each other and agree that each rank is there once.
namespace fsdpp::comm {

/// The way out for ranks that are slow to start.
inline constexpr const char* kMoreTime = "FSDPP_RENDEZVOUS_S gives slow ones more time";

/// "RANK" and "WORLD_SIZE", as the launcher calls them.
struct VariableNames {
  const char* rank;
  const char* world_size;
};
[[nodiscard]] VariableNames variable_names(const std::string& launcher);

struct StoreConnection {
  c10::intrusive_ptr<c10d::Store> store;
  std::string where;    ///< "node0:29500"
  bool serves = false;  ///< the server is in this process
};

/// Connects to the job's store: rank 0 serves it, unless the launcher's agent does. A rank 0 whose port is taken joins
/// as a client, so that two processes with rank 0 are told of each other. Throws ConfigError (port taken by something
/// else) or CommError{InitTimeout} (nobody answers), both within the time-out.
[[nodiscard]] StoreConnection connect_store(const RankEnv& env, std::chrono::milliseconds timeout);

/// One process as it announces itself.
struct Arrival {
  int rank = 0;
  int world_size = 1;
  std::string who;      ///< "node0, pid 123"
  std::string problem;  ///< not empty: this process can't take part, and why

  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static Arrival decode(const std::string& text);
};

/// The processes seen so far; says what is wrong with them.
class Roll {
 public:
  explicit Roll(VariableNames names) : names_(names) {}
  /// Takes one more; returns what is wrong, or an empty text.
  [[nodiscard]] std::string add(const Arrival& arrival);
  [[nodiscard]] bool complete() const {
    return !seen_.empty() && static_cast<int>(seen_.size()) == seen_.begin()->second.world_size;
  }
  [[nodiscard]] size_t count() const noexcept { return seen_.size(); }
  /// "1, 3" (at most ten of them).
  [[nodiscard]] std::string missing(int world_size) const;

 private:
  VariableNames names_;
  std::map<int, Arrival> seen_;
};

/// Announces `self` and waits until every rank is there exactly once. All ranks leave with the same verdict: normally,
/// or by ConfigError or CommError{InitTimeout} naming variables and values. Collective. `linger`: on failure, wait a
/// moment until the others have read the verdict, because the store ends with this process.
void rendezvous(Store& store, const Arrival& self, VariableNames names, std::chrono::milliseconds timeout, bool linger);

}  // namespace fsdpp::comm
