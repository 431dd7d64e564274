#include "comm/store.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <thread>

#include "base/enforce.h"

namespace fsdpp::comm {

void Backoff::pause() {
  std::this_thread::sleep_for(next_);
  next_ = std::min(next_ * 3 / 2, std::chrono::microseconds(20000));
}

C10dStore::C10dStore(c10::intrusive_ptr<c10d::Store> store, std::string prefix, std::string where,
                     std::function<void()> interrupt)
    : store_(std::move(store)),
      prefix_(std::move(prefix)),
      where_(std::move(where)),
      interrupt_(std::move(interrupt)) {}

template <class F>
auto C10dStore::guarded(const char* what, const std::string& key, F&& call) -> decltype(call()) {
  try {
    return call();
  } catch (const c10::Error& error) {
    fail_comm(CommErrc::RemoteDied,
              "store at {}: {} '{}' failed, so the process that serves the store has probably ended: {}", where_, what,
              key, error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail_comm(CommErrc::Backend, "store at {}: {} '{}' failed: {}", where_, what, key, error.what());
  }
}

void C10dStore::set(const std::string& key, const std::string& value) {
  guarded("set", key, [&] { store_->set(prefix_ + key, value); });
}

std::optional<std::string> C10dStore::try_get(const std::string& key) {
  return guarded("get", key, [&]() -> std::optional<std::string> {
    if (!store_->check({prefix_ + key})) return std::nullopt;
    return store_->get_to_str(prefix_ + key);
  });
}

std::string C10dStore::get(const std::string& key, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  Backoff backoff;
  while (true) {
    if (auto value = try_get(key)) return *std::move(value);
    if (interrupt_) interrupt_();
    if (std::chrono::steady_clock::now() >= deadline)
      fail_comm(CommErrc::Timeout, "store at {}: expected key '{}' within {} s, but no rank has set it", where_, key,
                static_cast<double>(timeout.count()) / 1e3);
    backoff.pause();
  }
}

int64_t C10dStore::add(const std::string& key, int64_t delta) {
  return guarded("add to", key, [&] { return store_->add(prefix_ + key, delta); });
}

std::shared_ptr<Store> make_memory_store(std::function<void()> interrupt) {
  return std::make_shared<C10dStore>(c10::make_intrusive<c10d::HashStore>(), "", "this process", std::move(interrupt));
}

}  // namespace fsdpp::comm
