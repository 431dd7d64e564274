#include "fsdpp/comm/world.h"

#include <unistd.h>

#include <ctime>
#include <exception>
#include <fstream>

#include "base/enforce.h"
#include "base/env.h"
#include "comm/comm_key.h"
#include "comm/device.h"
#include "comm/host_communicator.h"
#include "comm/rendezvous.h"
#include "comm/socket.h"
#include "comm/store.h"
#include "comm/watchdog.h"
#include "fsdpp/base/log.h"
#if FSDPP_CUDA
#include "comm/nccl_communicator.h"
#endif

namespace fsdpp::comm {
namespace {

using Clock = std::chrono::steady_clock;

Watchdog::Options watchdog_options() {
  Watchdog::Options options;
  if (auto limit = env::get_int("FSDPP_HEARTBEAT_S", 0, 86400)) options.dead_after = std::chrono::seconds(*limit);
  return options;
}

/// The world of one process for each rank.
class ProcessWorld final : public World {
 public:
  ProcessWorld(const RankEnv& env, const WorldOptions& options, c10::Device device)
      : env_(env), options_(options), device_(device) {}

  void connect(const std::string& problem) {
    if (env_.world_size == 1) {
      FSDPP_ENFORCE(problem.empty(), ConfigError, "{}", problem);
      store_ = make_memory_store();
      return;
    }
    connection_ = connect_store(env_, options_.rendezvous_timeout);
    // A stale key of an earlier attempt must not be seen: the launcher's store may outlive a restart.
    const auto prefix = fmt::format("fsdpp/{}/{}/", env_.run_id, env_.restart_count);
    const auto dog = std::make_shared<std::weak_ptr<Watchdog>>();
    store_ = std::make_shared<C10dStore>(connection_.store, prefix, connection_.where, [dog] {
      if (auto alive = dog->lock()) alive->check();
    });
    const Arrival self{env_.rank, env_.world_size, fmt::format("{}, pid {}", host_name(), ::getpid()), problem};
    rendezvous(*store_, self, variable_names(env_.launcher), options_.rendezvous_timeout, connection_.serves);
    watchdog_ = std::make_shared<Watchdog>(store_, env_.rank, env_.world_size, watchdog_options());
    *dog = watchdog_;
  }

  ~ProcessWorld() override {
    const bool failed = std::uncaught_exceptions() > 0 || (watchdog_ && watchdog_->failed());
    const bool watchdog_ran = watchdog_ != nullptr;  // so the rendezvous was good
    watchdog_.reset();
    if (watchdog_ran) leave(failed ? std::chrono::seconds(2) : std::chrono::seconds(10));
  }

  [[nodiscard]] int rank() const noexcept override { return env_.rank; }
  [[nodiscard]] int size() const noexcept override { return env_.world_size; }
  [[nodiscard]] int local_rank() const noexcept override { return env_.local_rank; }
  [[nodiscard]] c10::Device device() const noexcept override { return device_; }
  [[nodiscard]] const std::string& launcher() const noexcept override { return env_.launcher; }
  [[nodiscard]] Store& store() noexcept override { return *store_; }

  [[nodiscard]] std::shared_ptr<Communicator> make_communicator(const std::string& name, std::vector<int> ranks,
                                                                const CommunicatorOptions& options) override {
    ranks = member_ranks(name, std::move(ranks), rank(), size());
    const std::string key = keys_.next(name, ranks, size());
    CommInfo info{name, ranks, index_of(ranks, rank()), device_, options_.collective_timeout, options};
    const Bootstrap bootstrap{store_, key, env_.master_addr, options_.rendezvous_timeout, watchdog_.get()};
#if FSDPP_CUDA
    if (device_.is_cuda()) return make_nccl_communicator(std::move(info), bootstrap);
#endif
    return make_host_communicator(std::move(info), bootstrap);
  }

  void barrier() override {
    if (size() == 1) return;
    const auto base = fmt::format("barrier/{}", barriers_++);
    store_->set(fmt::format("{}/{}", base, rank()), "1");
    if (store_->add(base + "/count", 1) == size()) store_->set(base + "/done", "1");
    try {
      (void)store_->get(base + "/done", options_.collective_timeout);
    } catch (const CommError& error) {
      if (error.code() != CommErrc::Timeout) throw;
      fail_comm(CommErrc::Timeout, "World::barrier #{}: not reached within {} s by ranks {}", barriers_ - 1,
                static_cast<double>(options_.collective_timeout.count()) / 1e3, absent(base));
    }
  }

 private:
  std::string absent(const std::string& base) {
    std::string text;
    for (int r = 0; r < size(); ++r)
      if (!store_->try_get(fmt::format("{}/{}", base, r))) text += fmt::format("{}{}", text.empty() ? "" : ", ", r);
    return text;
  }

  // The store ends with rank 0's process, so that one stays until the others have said that they are done with it.
  void leave(std::chrono::milliseconds limit) noexcept {
    try {
      const auto end = Clock::now() + limit;
      Backoff backoff;
      int64_t left = store_->add("leave/count", 1);
      while (connection_.serves && left < size() && Clock::now() < end) {
        backoff.pause();
        left = store_->add("leave/count", 0);
      }
    } catch (...) {  // the server went first
    }
  }

  RankEnv env_;
  WorldOptions options_;
  c10::Device device_;
  StoreConnection connection_;
  std::shared_ptr<Store> store_;
  std::shared_ptr<Watchdog> watchdog_;
  CommKeys keys_;
  int64_t barriers_ = 0;
};

std::string json_escape(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) < 0x20)
      result += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      result += c;
  }
  return result;
}

}  // namespace

std::shared_ptr<World> World::init(const WorldOptions& options) {
  try {
    const RankEnv rank_env = detect_rank_env();
    log::set_rank(rank_env.rank, rank_env.world_size);
    WorldOptions used = options;
    if (auto limit = env::get_int("FSDPP_TIMEOUT_S", 1, 7 * 86400))
      used.collective_timeout = std::chrono::seconds(*limit);
    if (auto limit = env::get_int("FSDPP_RENDEZVOUS_S", 1, 86400)) used.rendezvous_timeout = std::chrono::seconds(*limit);
    const DeviceChoice choice = choose_device(options.device, rank_env);
    auto world = std::make_shared<ProcessWorld>(rank_env, used, choice.device);
    world->connect(choice.problem);
    if (choice.problem.empty()) use_device(choice.device);
    return world;
  } catch (const std::exception& error) {
    report_failure(error.what());
    throw;
  }
}

void report_failure(std::string_view message) noexcept {
  try {
    const auto path = env::get("TORCHELASTIC_ERROR_FILE");
    if (!path) return;
    std::ofstream file(*path, std::ios::trunc);
    file << fmt::format(R"({{"message": {{"message": "{}", "extraInfo": {{"timestamp": "{}"}}}}}})",
                        json_escape(message), std::time(nullptr))
         << '\n';
  } catch (...) {  // the message is on its way by other means too
  }
}

}  // namespace fsdpp::comm
