#include "support/host_world.h"

#include <exception>
#include <thread>
#include <vector>

#include "comm/comm_key.h"
#include "comm/host_communicator.h"
#include "comm/store.h"
#include "fsdpp/base/log.h"

namespace fsdpp::test {
namespace {

class HostWorld final : public comm::World {
 public:
  HostWorld(std::shared_ptr<comm::Store> store, int rank, int size, HostWorldOptions options)
      : store_(std::move(store)), rank_(rank), size_(size), options_(options) {}
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  int local_rank() const noexcept override { return rank_; }
  c10::Device device() const noexcept override { return c10::Device(c10::kCPU); }
  const std::string& launcher() const noexcept override {
    static const std::string name = "test";
    return name;
  }
  comm::Store& store() noexcept override { return *store_; }
  std::shared_ptr<comm::Communicator> make_communicator(const std::string& name, std::vector<int> ranks,
                                                        const comm::CommunicatorOptions& options) override {
    ranks = comm::member_ranks(name, std::move(ranks), rank_, size_);
    const comm::Bootstrap boot{store_, keys_.next(name, ranks, size_), "127.0.0.1", options_.rendezvous_timeout,
                               nullptr};
    return comm::make_host_communicator(
        {name, ranks, comm::index_of(ranks, rank_), device(), options_.collective_timeout, options}, boot);
  }
  void barrier() override {
    if (!barrier_) barrier_ = make_communicator("world.barrier", {}, {});
    barrier_->barrier();
  }

 private:
  std::shared_ptr<comm::Store> store_;
  int rank_, size_;
  HostWorldOptions options_;
  comm::CommKeys keys_;
  std::shared_ptr<comm::Communicator> barrier_;
};

}  // namespace

void run_host_world(int size, const std::function<void(std::shared_ptr<comm::World>)>& body,
                    const HostWorldOptions& options) {
  auto store = comm::make_memory_store();
  std::vector<std::exception_ptr> failures(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      log::set_rank(rank, size, true);
      try {
        body(std::make_shared<HostWorld>(store, rank, size, options));
      } catch (...) {
        failures[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace fsdpp::test
