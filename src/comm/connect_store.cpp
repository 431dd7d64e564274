#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "base/enforce.h"
#include "comm/rendezvous.h"
#include "comm/socket.h"
#include "comm/store.h"

namespace fsdpp::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1e3; }

struct Attempt {
  std::mutex mutex;
  std::condition_variable done_changed;
  bool done = false;
  StorePtr store;
  std::exception_ptr error;
};

// Connecting to a port where something that is no store listens may block for ever inside c10d; so it happens on a
// thread that is left alone when the time is up.
StorePtr with_deadline(std::chrono::milliseconds timeout, std::function<StorePtr()> connect) {
  auto attempt = std::make_shared<Attempt>();
  std::thread([attempt, connect = std::move(connect)] {
    StorePtr store;
    std::exception_ptr error;
    try {
      store = connect();
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard lock(attempt->mutex);
    attempt->store = std::move(store);
    attempt->error = error;
    attempt->done = true;
    attempt->done_changed.notify_all();
  }).detach();
  std::unique_lock lock(attempt->mutex);
  if (!attempt->done_changed.wait_for(lock, timeout, [&] { return attempt->done; })) return {};
  if (attempt->error) std::rethrow_exception(attempt->error);
  return std::move(attempt->store);
}

c10d::TCPStoreOptions options_for(const RankEnv& env, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.waitWorkers = false;
  options.timeout = timeout;
  return options;
}

// 0 once anybody listens at the store's address; the last error of a connection if nobody does until `deadline`.
int wait_for_listener(const RankEnv& env, Deadline deadline) {
  Backoff backoff;
  while (!connect_tcp(env.master_addr, static_cast<uint16_t>(env.master_port), deadline).valid()) {
    const int error = errno;
    if (std::chrono::steady_clock::now() >= deadline) return error;
    backoff.pause();
  }
  return 0;
}

// A store answers at once; more time is for many ranks that ask together. What does not answer is none.
std::chrono::milliseconds patience_for_answer(const RankEnv& env) {
  return std::chrono::seconds(4) + std::chrono::milliseconds(env.world_size);
}

StorePtr connect_client(const RankEnv& env, std::chrono::milliseconds timeout) {
  std::string reason;
  try {
    if (const int error = wait_for_listener(env, std::chrono::steady_clock::now() + timeout)) {
      reason = fmt::format("no connection within {} s ({}). Try: check that rank 0 runs and that this host can reach it; {}",
                           seconds(timeout), std::strerror(error), kMoreTime);
    } else {
      const auto patience = std::min(patience_for_answer(env), timeout);
      auto store = with_deadline(patience, [env, timeout]() -> StorePtr {
        return c10::make_intrusive<c10d::TCPStore>(env.master_addr, options_for(env, timeout));
      });
      if (store) return store;
      reason = fmt::format("something that has not answered as a store for {} s, so another program is likely to have the port. "
                           "Try: another MASTER_PORT on all ranks", seconds(patience));
    }
  } catch (const c10::Error& error) {
    reason = error.what_without_backtrace();
  }
  fail_comm(CommErrc::InitTimeout, "rendezvous: expected {} at MASTER_ADDR={} MASTER_PORT={}, got: {}",
            env.use_agent_store ? "the launcher's store" : "rank 0's store", env.master_addr, env.master_port, reason);
}

StorePtr serve(const RankEnv& env, Socket listener, std::chrono::milliseconds timeout) {
  auto options = options_for(env, timeout);
  options.isServer = true;
  options.masterListenFd = listener.release();
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

// Somebody has our port: another rank 0 of this job, or a stranger.
StorePtr join_other_server(const RankEnv& env, std::chrono::milliseconds timeout) {
  try {
    RankEnv local = env;
    local.master_addr = "127.0.0.1";
    return connect_client(local, std::min<std::chrono::milliseconds>(timeout, std::chrono::seconds(5)));
  } catch (const CommError&) {
    fail<ConfigError>(
        "rendezvous: expected to serve the store at MASTER_PORT={} on this host (rank 0), but the port is in use by "
        "another "
        "program. Try: another MASTER_PORT on all ranks",
        env.master_port);
  }
}

}  // namespace

StoreConnection connect_store(const RankEnv& env, std::chrono::milliseconds timeout) {
  const std::string where = fmt::format("{}:{}", env.master_addr, env.master_port);
  if (env.rank != 0 || env.use_agent_store) return {connect_client(env, timeout), where, false};
  Socket listener = listen_tcp(static_cast<uint16_t>(env.master_port));
  if (listener.valid()) return {serve(env, std::move(listener), timeout), where, true};
  const int error = errno;
  if (error == EADDRINUSE) return {join_other_server(env, timeout), where, false};
  fail<ConfigError>(
      "rendezvous: expected to listen on MASTER_PORT={} (rank 0), got: {}. Try: another MASTER_PORT on all ranks",
      env.master_port, std::strerror(error));
}

}  // namespace fsdpp::comm
