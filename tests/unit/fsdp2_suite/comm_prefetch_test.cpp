// After test_fully_shard_comm.py, TestFullyShardPrefetch: in which order units are gathered, given back and reduced.
#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

using ::testing::ElementsAre;
using Names = std::vector<std::string>;
using Log = EventLog;

/// Embedding and head in the root unit (no name), units block0, block1, …
TinyNet sharded_net(const Rank& world, int blocks, Reshard reshard) {
  auto net = filled(TinyNet(23, 7, blocks), *world);
  shard_tiny_net(net, Mesh::shard(world), {.reshard_after_forward = reshard}, {.reshard_after_forward = reshard});
  return net;
}
at::Tensor loss_of(TinyNet& net, const World& world) {
  auto ids = tokens(world.rank()).to(world.device());
  return token_loss(net(ids), ids);
}

/// `names` less those of gathers when `gathers` is false, in front of them the root's gather when `root` says so.
Names expected(bool root, bool gathers, Names names) {
  if (!gathers) std::erase_if(names, [](auto& n) { return n.starts_with("unshard"); });
  if (root) names.insert(names.begin(), "unshard");
  return names;
}

const Names kForward{"unshard", "unshard block0", "unshard block1", "unshard block2"};
const Names kBackward{"unshard block2", "unshard block1", "post_backward block2", "unshard block0", "post_backward block1", "post_backward block0", "post_backward"};

TEST(Prefetch, FullyShardBackwardPrefetch) {
  for (Reshard reshard : {Reshard{}, Reshard{true}, Reshard{false}, Reshard{2}})
    each_rank(4, [&](Rank world) {
      auto net = sharded_net(world, 3, reshard);
      Log log(Log::What::Units, *world);
      bool kept = reshard && reshard->group() == 1;
      for (int step = 0; step < 3; ++step) {
        auto loss = loss_of(net, *world);
        EXPECT_EQ(log.take_without({"reshard"}), kForward) << "step " << step;
        loss.backward();
        // Each block is asked for while the one after it (in forward) still computes.
        EXPECT_EQ(log.take_without({"reshard"}), expected(reshard.has_value() && !kept, !kept, kBackward)) << "step " << step;
        for (auto& p : net->parameters()) p.mutable_grad() = at::Tensor();
      }
    });
}

// On one rank nothing is on the wire, so nothing is gathered ahead.
TEST(Prefetch, SingleRankUnshardsInNaturalOrder) {
  each_rank(1, [](Rank world) {
    auto net = sharded_net(world, 2, true);
    Log log(Log::What::Units, *world);
    for (int step = 0; step < 2; ++step) {
      auto loss = loss_of(net, *world);
      EXPECT_THAT(log.take(), ElementsAre("unshard", "unshard block0", "reshard block0", "unshard block1", "reshard block1", "reshard"));
      loss.backward();
      EXPECT_THAT(log.take(), ElementsAre("unshard", "unshard block1", "reshard block1", "post_backward block1", "unshard block0", "reshard block0",
                                          "post_backward block0", "reshard", "post_backward"));
    }
  });
}

// Two forwards, one backward over both: FSDP2 gathers and reduces every block twice. Here a block's gradients of both uses are added
// by autograd and reduced once, with half the collectives.
TEST(Prefetch, BackwardPrefetchMultiForward) {
  for (Reshard reshard : {Reshard{}, Reshard{true}, Reshard{false}})
    each_rank(2, [&](Rank world) {
      auto net = sharded_net(world, 3, reshard);
      Log log(Log::What::Units, *world);
      bool kept = reshard && reshard->group() == 1, root_again = reshard && !kept;
      auto first = loss_of(net, *world), second = loss_of(net, *world);
      Names forward = kForward;
      if (!kept)
        for (auto& n : expected(root_again, true, {kForward.begin() + 1, kForward.end()})) forward.push_back(n);
      EXPECT_EQ(log.take_without({"reshard"}), forward);
      (first + second).backward();
      EXPECT_EQ(log.take_without({"reshard"}),
                expected(root_again, !kept, {"unshard block2", "unshard block1", "unshard block0", "post_backward block2", "post_backward block1",
                                             "post_backward block0", "post_backward"}));
      expect_sharded(*net);
    });
}

// first, then two branches of which each backward takes one.
struct BranchesImpl : torch::nn::Module {
  explicit BranchesImpl(int64_t dim) {
    first = register_module("first", torch::nn::Linear(dim, dim));
    lin1 = register_module("lin1", torch::nn::Linear(dim, dim));
    lin2 = register_module("lin2", torch::nn::Linear(dim, dim));
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    auto y = first(x);
    return {lin1(y), lin2(y)};
  }
  Hooked<torch::nn::Linear> first{nullptr}, lin1{nullptr}, lin2{nullptr};
};
FSDPP_MODULE(Branches);

void expect_branch_gradients(Branches& sharded, const World& world, int ranks) {
  auto plain = filled(Branches(8), world);
  for (int r = 0; r < ranks; ++r) {
    auto [a, b] = plain(random_input(world, {4, 8}, r));
    ((a.sum() + b.sum()) / ranks).backward();
  }
  expect_same_parameters(*sharded, *plain, 1e-6, 1e-6);
}

TEST(Prefetch, BackwardPrefetchUnusedInBackward) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto net = filled(Branches(8), *world);
    for (auto& m : {net->first, net->lin1, net->lin2}) fully_shard(m, mesh, {.reshard_after_forward = true});
    auto root = fully_shard(net, mesh, {.reshard_after_forward = true});  // without parameters
    auto events = [&, log = std::make_shared<Log>(Log::What::Units, *world)] {
      auto all = log->take_without({"reshard"});
      std::erase(all, "unshard");  // the root, which has nothing to gather
      std::erase(all, "post_backward");
      return all;
    };
    auto [loss1, loss2] = net(random_input(*world, {4, 8}, world->rank()));
    EXPECT_THAT(events(), ElementsAre("unshard first", "unshard lin1", "unshard lin2"));
    root.set_is_last_backward(false);
    loss2.sum().backward({}, /*retain_graph=*/true);
    // lin1 is gathered ahead in vain, and given back at the end of this backward.
    EXPECT_THAT(events(), ElementsAre("unshard lin2", "unshard lin1", "post_backward lin2", "unshard first", "post_backward first"));
    expect_sharded(*net);
    EXPECT_FALSE(net->lin1->weight.grad().defined());
    root.set_is_last_backward(true);
    loss1.sum().backward();
    EXPECT_THAT(events(), ElementsAre("unshard lin1", "unshard first", "post_backward lin1", "post_backward first"));
    expect_sharded(*net);
    expect_branch_gradients(net, *world, 2);
  });
}

// -- explicit lists ------------------------------------------------------------------------------------------------------

std::vector<UnitHandle> neighbours(TinyNet& net, int from, int step, int count) {
  std::vector<UnitHandle> list;
  for (int j = 1; j <= count; ++j) list.push_back(unit_of(*net->blocks[static_cast<size_t>(from + step * j)]));
  return list;
}

const Names kBackwardOfFour{"unshard", "unshard block3", "unshard block2", "reshard block3", "post_backward block3", "unshard block1", "reshard block2",
                            "post_backward block2", "unshard block0", "reshard block1", "post_backward block1", "reshard block0", "post_backward block0",
                            "reshard", "post_backward"};

TEST(Prefetch, SetModulesToForwardPrefetch) {
  const std::map<int, Names> forward{
      {1, {"unshard", "unshard block0", "unshard block1", "reshard block0", "unshard block2", "reshard block1", "unshard block3", "reshard block2",
           "reshard block3", "reshard"}},
      {2, {"unshard", "unshard block0", "unshard block1", "unshard block2", "reshard block0", "unshard block3", "reshard block1", "reshard block2",
           "reshard block3", "reshard"}}};
  for (auto& [depth, names] : forward)
    each_rank(2, [&, depth = depth, &names = names](Rank world) {
      auto net = sharded_net(world, 4, true);
      for (int i = 0; i + depth < 4; ++i) unit_of(*net->blocks[i]).set_modules_to_forward_prefetch(neighbours(net, i, 1, depth));
      Log log(Log::What::Units, *world);
      for (int step = 0; step < 2; ++step) {
        auto loss = loss_of(net, *world);
        EXPECT_EQ(log.take(), names) << "depth " << depth << ", step " << step;
        loss.backward();
        EXPECT_EQ(log.take(), kBackwardOfFour) << "depth " << depth << ", step " << step;
      }
    });
}

TEST(Prefetch, SetModulesToBackwardPrefetch) {
  const Names two{"unshard", "unshard block3", "unshard block2", "unshard block1", "reshard block3", "post_backward block3", "unshard block0", "reshard block2",
                  "post_backward block2", "reshard block1", "post_backward block1", "reshard block0", "post_backward block0", "reshard", "post_backward"};
  for (int depth : {1, 2})
    each_rank(2, [&](Rank world) {
      auto net = sharded_net(world, 4, true);
      for (int i = depth; i < 4; ++i) unit_of(*net->blocks[i]).set_modules_to_backward_prefetch(neighbours(net, i, -1, depth));
      Log log(Log::What::Units, *world);
      auto loss = loss_of(net, *world);
      EXPECT_THAT(log.take(), ElementsAre("unshard", "unshard block0", "reshard block0", "unshard block1", "reshard block1", "unshard block2", "reshard block2",
                                          "unshard block3", "reshard block3", "reshard"));
      loss.backward();
      EXPECT_EQ(log.take(), depth == 1 ? kBackwardOfFour : two) << "depth " << depth;
    });
}

TEST(Prefetch, AnEmptyListBringsTheRecordedOrderBack) {
  each_rank(2, [](Rank world) {
    auto net = sharded_net(world, 4, true);
    unit_of(*net->blocks[3]).set_modules_to_backward_prefetch(neighbours(net, 3, -1, 3));
    unit_of(*net->blocks[3]).set_modules_to_backward_prefetch({});
    Log log(Log::What::Units, *world);
    auto loss = loss_of(net, *world);
    (void)log.take();
    loss.backward();
    EXPECT_EQ(log.take(), kBackwardOfFour);
  });
}

// in_proj comes last in backward and asks for out_proj, which nobody needs any more.
TEST(Prefetch, BackwardMisprefetch) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto sharded = filled(Mlp(16), *world), plain = filled(Mlp(16), *world);
    for (auto& m : {sharded->in_proj, sharded->out_proj}) fully_shard(m, mesh);
    fully_shard(sharded, mesh);
    unit_of(*sharded->in_proj).set_modules_to_backward_prefetch({unit_of(*sharded->out_proj)});
    expect_train_parity(*world, trainee(sharded), trainee(plain), [&](int i, int r) { return random_input(*world, {2, 16}, 10 * i + r); });
    EXPECT_EQ(unit_of(*sharded->out_proj).stats().backward_gathers, 10);
  });
}

// -- units of several modules --------------------------------------------------------------------------------------------

struct WithUnusedImpl : torch::nn::Module {
  WithUnusedImpl() {
    unused = register_module("unused", torch::nn::Linear(1, 1));
    lin = register_module("lin", torch::nn::Linear(16, 16));
  }
  at::Tensor forward(const at::Tensor& x) { return at::relu(lin(x)); }
  Hooked<torch::nn::Linear> unused{nullptr}, lin{nullptr};
};
FSDPP_MODULE(WithUnused);
struct UnusedStackImpl : torch::nn::Module {
  UnusedStackImpl() {
    a = register_module("a", WithUnused());
    b = register_module("b", WithUnused());
    last = register_module("last", torch::nn::Linear(16, 16));
  }
  at::Tensor forward(const at::Tensor& x) { return last(b(a(x))); }
  WithUnused a{nullptr}, b{nullptr};
  torch::nn::Linear last{nullptr};
};
FSDPP_MODULE(UnusedStack);

TEST(Prefetch, FullyShardMultiModuleUnusedModule) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto sharded = filled(UnusedStack(), *world), plain = filled(UnusedStack(), *world);
    for (auto& m : {sharded->a, sharded->b}) fully_shard({m->unused.ptr(), m->lin.ptr()}, mesh, {.reshard_after_forward = true});
    fully_shard(sharded, mesh);
    for (int step = 0; step < 3; ++step) {
      Log log(Log::What::Units, *world);
      auto loss = sharded(random_input(*world, {2, 16}, world->rank())).sum();
      EXPECT_THAT(log.take_without({"reshard"}), ElementsAre("unshard", "unshard a.unused", "unshard b.unused"));
      loss.backward();
      EXPECT_THAT(log.take_without({"reshard"}), ElementsAre("unshard b.unused", "post_backward", "unshard a.unused", "post_backward b.unused",
                                                             "post_backward a.unused"));
      expect_sharded(*sharded);
      for (int r = 0; r < 2; ++r) (plain(random_input(*world, {2, 16}, r)).sum() / 2).backward();
    }
    EXPECT_FALSE(sharded->a->unused->weight.grad().defined());
    expect_same_parameters(*sharded, *plain, 1e-6, 1e-6);
  });
}

// Blocks 1 and 2, and 3 and 4, are units of two modules each: gathered once for both.
TEST(Prefetch, FullyShardMultiModuleBackwardPrefetch) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto net = filled(TinyNet(23, 7, 5), *world);
    auto& b = net->blocks;
    fully_shard(b[0], mesh);
    fully_shard({b[1].ptr(), b[2].ptr()}, mesh);
    fully_shard({b[3].ptr(), b[4].ptr()}, mesh);
    fully_shard(net, mesh);
    Log log(Log::What::Units, *world);
    for (int step = 0; step < 3; ++step) {
      auto loss = loss_of(net, *world);
      EXPECT_THAT(log.take_without({"reshard"}), ElementsAre("unshard", "unshard block0", "unshard block1", "unshard block3")) << step;
      loss.backward();
      EXPECT_THAT(log.take_without({"reshard"}), ElementsAre("unshard block3", "unshard block1", "post_backward block3", "unshard block0", "post_backward block1",
                                                             "post_backward block0", "post_backward")) << step;
    }
  });
}

}  // namespace
}  // namespace fsdpp::test::suite
