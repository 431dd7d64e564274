#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "base/enforce.h"
#include "comm/comm_key.h"
#include "comm/local_communicator.h"
#include "comm/store.h"
#include "fsdpp/base/log.h"
#include "fsdpp/comm/world.h"

namespace fsdpp::comm {
namespace {

/// What the ranks of one run_local_world share.
class Shared {
 public:
  Shared(int size, LocalWorldOptions options)
      : size_(size), options_(std::move(options)), store_(make_memory_store([this] { failure_.check(); })) {}

  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] const LocalWorldOptions& options() const noexcept { return options_; }
  [[nodiscard]] Store& store() noexcept { return *store_; }

  std::shared_ptr<LocalHub> hub(const std::string& key, const std::vector<int>& ranks) {
    std::lock_guard lock(mutex_);
    failure_.check();
    auto& slot = hubs_[key];
    if (!slot) slot = std::make_shared<LocalHub>(key, ranks);
    return slot;
  }

  void abort(const std::string& why) noexcept {
    std::vector<std::shared_ptr<LocalHub>> hubs;
    {
      std::lock_guard lock(mutex_);
      failure_.set(CommErrc::Aborted, why);
      for (const auto& [key, hub] : hubs_) hubs.push_back(hub);
    }
    for (const auto& hub : hubs) hub->fail(CommErrc::Aborted, why);
  }

 private:
  int size_;
  LocalWorldOptions options_;
  Failure failure_;
  std::shared_ptr<Store> store_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<LocalHub>> hubs_;
};

class LocalWorld final : public World {
 public:
  LocalWorld(std::shared_ptr<Shared> shared, int rank) : shared_(std::move(shared)), rank_(rank) {
    barrier_ = make(std::string("world.barrier"), {}, {}, {});
  }

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return shared_->size(); }
  [[nodiscard]] int local_rank() const noexcept override { return rank_; }
  [[nodiscard]] c10::Device device() const noexcept override { return c10::Device(c10::kCPU); }
  [[nodiscard]] const std::string& launcher() const noexcept override {
    static const std::string name = "threads";
    return name;
  }
  [[nodiscard]] Store& store() noexcept override { return shared_->store(); }
  [[nodiscard]] std::shared_ptr<Communicator> make_communicator(const std::string& name, std::vector<int> ranks,
                                                                const CommunicatorOptions& options) override {
    return make(name, std::move(ranks), shared_->options().on_operation, options);
  }
  void barrier() override { barrier_->barrier(); }

 private:
  std::shared_ptr<Communicator> make(const std::string& name, std::vector<int> ranks,
                                     std::function<Fault(const OperationEvent&)> on_operation,
                                     const CommunicatorOptions& options) {
    ranks = member_ranks(name, std::move(ranks), rank_, size());
    auto hub = shared_->hub(keys_.next(name, ranks, size()), ranks);
    CommInfo info{name, ranks, index_of(ranks, rank_), device(), shared_->options().collective_timeout, options};
    return std::make_shared<LocalCommunicator>(std::move(info), std::move(hub), std::move(on_operation));
  }

  std::shared_ptr<Shared> shared_;
  int rank_;
  CommKeys keys_;
  std::shared_ptr<Communicator> barrier_;
};

// True for errors that follow from another rank's failure.
bool is_consequence(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const CommError& error) {
    return error.code() == CommErrc::Aborted || error.code() == CommErrc::RemoteDied;
  } catch (...) {
    return false;
  }
}

std::string text_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

void rethrow_first(const std::vector<std::exception_ptr>& failures) {
  for (const auto& failure : failures)
    if (failure && !is_consequence(failure)) std::rethrow_exception(failure);
  for (const auto& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace

void run_local_world(int size, const std::function<void(std::shared_ptr<World>)>& body,
                     const LocalWorldOptions& options) {
  FSDPP_ENFORCE(size >= 1, UsageError, "run_local_world: expected 1 or more ranks, got {}", size);
  auto shared = std::make_shared<Shared>(size, options);
  std::vector<std::exception_ptr> failures(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      log::set_rank(rank, size, true);
      try {
        body(std::make_shared<LocalWorld>(shared, rank));
      } catch (...) {
        auto& failure = failures[static_cast<size_t>(rank)] = std::current_exception();
        shared->abort(fmt::format("rank {} failed: {}", rank, text_of(failure)));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  rethrow_first(failures);
}

}  // namespace fsdpp::comm
