#pragma once
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>

#include "fsdpp/comm/world.h"

namespace fsdpp::comm {

/// A c10d store behind a prefix. Waiting is polling, so that one thread's wait never blocks another thread's call.
class C10dStore final : public Store {
 public:
  /// `where` names the server in errors. `interrupt`, if given, is called while waiting and may throw.
  C10dStore(c10::intrusive_ptr<c10d::Store> store, std::string prefix, std::string where,
            std::function<void()> interrupt = {});

  void set(const std::string& key, const std::string& value) override;
  [[nodiscard]] std::string get(const std::string& key, std::chrono::milliseconds timeout) override;
  [[nodiscard]] std::optional<std::string> try_get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t delta) override;

 private:
  template <class F>
  auto guarded(const char* what, const std::string& key, F&& call) -> decltype(call());

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_, where_;
  std::function<void()> interrupt_;
};

/// A store inside this process (c10d's HashStore).
[[nodiscard]] std::shared_ptr<Store> make_memory_store(std::function<void()> interrupt = {});

/// Sleeps between two polls: short at first, at most 20 ms.
class Backoff {
 public:
  void pause();

 private:
  std::chrono::microseconds next_{200};
};

}  // namespace fsdpp::comm
