// Recomputation over real processes, each with a generator of its own.
#include <gtest/gtest.h>

#include "fsdpp/api/checkpoint.h"
#include "support/tiny_models.h"
#include "support/world_size.h"

namespace fsdpp::test {
namespace {

struct DropNetImpl : torch::nn::Module {
  explicit DropNetImpl(bool recompute) : recomputes(recompute) {
    for (int i = 0; i < 3; ++i) blocks.push_back(register_module("block" + std::to_string(i), TinyBlock(7)));
    fill_parameters(*this, 2);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& b : blocks) {
      auto part = [&](const at::Tensor& t) {
        auto h = at::dropout(t, 0.5, true);
        masks.push_back(h.detach() != 0);
        return at::dropout(b(h), 0.5, true);
      };
      x = recomputes ? checkpoint(part, x) : part(x);
    }
    return x.sum();
  }
  std::vector<TinyBlock> blocks;
  std::vector<at::Tensor> masks;
  bool recomputes;
};
FSDPP_MODULE(DropNet);

TEST(Recompute, DropoutOfEachRankIsReplayedAndGradientsAreEqual) {
  auto world = comm::World::init({.device = c10::DeviceType::CPU});
  ASSERT_NO_FATAL_FAILURE(expect_started_world_size(*world));
  auto mesh = comm::Mesh::shard(world);
  auto train = [&](bool recomputes) {
    DropNet net(recomputes);
    for (auto& b : net->blocks) fully_shard(b, mesh);
    fully_shard(net, mesh);
    at::manual_seed(100 + world->rank());
    for (int step = 0; step < 3; ++step) {
      net(at::ones({8, 7})).backward();
      if (world->rank() == 1) (void)at::rand({3});  // ranks need not draw the same
    }
    return net;
  };
  auto plain = train(false), recomputed = train(true);
  ASSERT_EQ(recomputed->masks.size(), 2 * plain->masks.size());
  EXPECT_FALSE(at::equal(plain->masks[0], plain->masks[3]));  // masks are drawn anew in each step
  auto p = plain->parameters(), q = recomputed->parameters();
  for (size_t i = 0; i < p.size(); ++i) {
    ASSERT_TRUE(p[i].grad().defined());
    EXPECT_TRUE(at::equal(q[i].grad(), p[i].grad())) << "parameter " << i;
  }
  auto mine = plain->masks[0].to(at::kFloat), first = mine.clone();
  mesh->gather_comm().broadcast({first.data_ptr(), first.numel(), at::kFloat}, 0, {}, {}).wait_host();
  EXPECT_EQ(at::equal(mine, first), world->rank() == 0) << "ranks draw masks of their own";
}

}  // namespace
}  // namespace fsdpp::test
