#include "fsdpp/comm/simulated_world.h"

#include <algorithm>

#include "base/enforce.h"
#include "comm/comm_key.h"
#include "comm/device.h"
#include "comm/simulated_communicator.h"
#include "comm/store.h"

namespace fsdpp::comm {
namespace {

class Simulation final : public SimulatedWorld {
 public:
  Simulation(const SimulatedOptions& options, c10::Device device) : options_(options), device_(device) {}

  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return options_.ranks; }
  [[nodiscard]] int local_rank() const noexcept override { return 0; }
  [[nodiscard]] c10::Device device() const noexcept override { return device_; }
  [[nodiscard]] const std::string& launcher() const noexcept override { return launcher_; }
  [[nodiscard]] Store& store() noexcept override { return *store_; }
  void barrier() override {}

  [[nodiscard]] std::shared_ptr<Communicator> make_communicator(const std::string& name, std::vector<int> ranks,
                                                                const CommunicatorOptions& options) override {
    ranks = member_ranks(name, std::move(ranks), rank(), size());
    const bool one_node = ranks.back() < options_.ranks_per_node;
    CommInfo info{name, std::move(ranks), 0, device_, std::chrono::seconds(300), options};
    state_->use[name];
    return std::make_shared<SimulatedCommunicator>(std::move(info), one_node ? options_.within : options_.between, state_);
  }

  void set_delays(bool on) noexcept override { state_->delays = on; }
  [[nodiscard]] std::map<std::string, FabricUse> use() const override { return state_->use; }
  void reset_use() override {
    for (auto& [name, use] : state_->use) use = {};
  }

 private:
  SimulatedOptions options_;
  c10::Device device_;
  std::string launcher_ = "simulated";
  std::shared_ptr<Store> store_ = make_memory_store();
  std::shared_ptr<SimulatedState> state_ = std::make_shared<SimulatedState>();
};

}  // namespace

std::shared_ptr<SimulatedWorld> SimulatedWorld::make(const SimulatedOptions& options) {
  FSDPP_ENFORCE(options.ranks >= 1 && options.ranks_per_node >= 1, ConfigError,
                "SimulatedWorld: expected at least 1 rank and 1 rank a node, got {} and {}", options.ranks,
                options.ranks_per_node);
  const auto positive = [](const FabricLink& link) { return link.bytes_per_s > 0 && link.latency_s >= 0; };
  FSDPP_ENFORCE(positive(options.within) && positive(options.between), ConfigError,
                "SimulatedWorld: expected links with a bandwidth above 0 and a latency of 0 or more");
  const DeviceChoice choice = choose_device(options.device, RankEnv{});
  FSDPP_ENFORCE(choice.problem.empty(), ConfigError, "{}", choice.problem);
  use_device(choice.device);
  return std::make_shared<Simulation>(options, choice.device);
}

}  // namespace fsdpp::comm
