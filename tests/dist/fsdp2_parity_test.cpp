// The training-parity tests of the FSDP2 suite over real processes, on the CPU or, with FSDPP_TEST_DEVICE=cuda, on GPUs with NCCL.
#include "base/env.h"
#include "support/world_size.h"
#include "unit/fsdp2_suite/parity_bodies.h"

namespace fsdpp::test::suite {
namespace {

bool on_cuda() { return env::get("FSDPP_TEST_DEVICE").value_or("cpu") == "cuda"; }

const Rank& world() {
  static auto* instance = [] {
    comm::WorldOptions options;
    options.device = on_cuda() ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
    return new Rank(std::make_shared<SlowWorld>(World::init(options)));
  }();
  return *instance;
}

class Fsdp2Parity : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(expect_started_world_size(*world()));
    ASSERT_EQ(world()->device().is_cuda(), on_cuda());
  }
  static void for_each_reshard(const std::function<void(Reshard)>& body) {
    for (auto reshard : reshard_choices(world()->size())) body(reshard);
  }
};

// Inputs on the host come to the rank's device, also those inside a tuple.
struct MovesImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const std::pair<at::Tensor, at::Tensor>& ys) {
    for (auto* t : {&x, &ys.first, &ys.second}) EXPECT_EQ(t->device(), world()->device());
    return x + ys.first + ys.second + 1;
  }
};
FSDPP_MODULE(Moves);

TEST_F(Fsdp2Parity, RootMoveForwardInputToDevice) {
  Moves net;
  fully_shard(net, mesh_of(world()));
  EXPECT_TRUE(at::equal(net(at::ones({3}), std::pair{at::ones({3}), at::ones({3})}).cpu(), at::full({3}, 4.0f)));
}

TEST_F(Fsdp2Parity, SingleGroup) {
  for_each_reshard([](Reshard reshard) { train_parity_single_group(world(), {7, 15, 3}, reshard); });
}
TEST_F(Fsdp2Parity, MultiGroup) {
  for_each_reshard([](Reshard reshard) { train_parity_multi_group(world(), reshard, Delay::Everywhere); });
  for (auto delay : kSingleDelays) train_parity_multi_group(world(), true, delay);
}
TEST_F(Fsdp2Parity, MultiGroupUnshardAsyncOp) { train_parity_multi_group(world(), true, Delay::Everywhere, /*unshard_async=*/true); }
TEST_F(Fsdp2Parity, NonRootForwardBackward) { non_root_forward_backward(world()); }
TEST_F(Fsdp2Parity, MultiForwardModule) { for_each_reshard([](Reshard reshard) { multi_forward_module(world(), reshard); }); }
TEST_F(Fsdp2Parity, ExplicitPrefetching) { explicit_prefetching(world()); }
TEST_F(Fsdp2Parity, PostOptimEvent) { post_optim_event(world()); }
TEST_F(Fsdp2Parity, SharedParams) {
  for (auto tying : kTyings) train_parity_with_shared_params(world(), true, tying);
  train_shared_params_uneven_shard(world(), true);
}
TEST_F(Fsdp2Parity, Hsdp) {
  for (int replicas : {1, 2, world()->size()})
    if (world()->size() % replicas == 0)
      for (bool last_only : {false, true}) train_parity_hsdp(world(), replicas, 17, true, last_only);
}

}  // namespace
}  // namespace fsdpp::test::suite
