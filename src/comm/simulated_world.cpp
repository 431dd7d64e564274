#include "fsdpp/comm/simulated_world.h"

#include <algorithm>

#include "base/enforce.h"
#include "comm/comm_key.h"
#include "comm/device.h"
#include "comm/simulated_communicator.h"
#include "comm/store.h"

namespace fsdpp::comm {
namespace {

std::shared_ptr<SimulatedWires> make_wires(c10::Device device) {
#if FSDPP_CUDA
  if (device.is_cuda()) return make_device_wires(device);
#endif
  FSDPP_ENFORCE(device.is_cpu(), ConfigError, "SimulatedWorld: expected the CPU or a CUDA device, got {}",
                device.str());
  return make_host_wires();
}

class Simulation final : public SimulatedWorld {
 public:
  Simulation(const SimulatedOptions& options, c10::Device device)
      : options_(options), device_(device), wires_(make_wires(device)) {}

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
    const FabricRing ring = ring_of(ranks);
    CommInfo info{name, std::move(ranks), 0, device_, std::chrono::seconds(300), options};
    const auto known = users_.find(name);
    const int user = known != users_.end() ? known->second : users_.emplace(name, wires_->add_user()).first->second;
    return std::make_shared<SimulatedCommunicator>(std::move(info), ring, wires_, user);
  }

  void set_delays(bool on) override { wires_->set_delays(on); }
  [[nodiscard]] std::map<std::string, FabricUse> use() const override {
    std::map<std::string, FabricUse> all;
    for (const auto& [name, user] : users_) all[name] = wires_->use(user);
    return all;
  }
  void reset_use() override { wires_->reset_use(); }

 private:
  [[nodiscard]] FabricRing ring_of(const std::vector<int>& ranks) const {
    std::map<int, int> members;  // by node
    for (const int r : ranks) ++members[r / options_.ranks_per_node];
    const auto fewest =
        std::min_element(members.begin(), members.end(), [](auto& a, auto& b) { return a.second < b.second; });
    return {.ranks = static_cast<int>(ranks.size()),
            .nodes = static_cast<int>(members.size()),
            .adapters = fewest->second,
            .within = options_.within,
            .between = options_.between,
            .tree_below = options_.tree_below};
  }

  SimulatedOptions options_;
  c10::Device device_;
  std::string launcher_ = "simulated";
  std::shared_ptr<Store> store_ = make_memory_store();
  std::shared_ptr<SimulatedWires> wires_;
  std::map<std::string, int> users_;  ///< by name of the communicator
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
