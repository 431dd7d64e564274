// Memory of forwards that no backward follows.
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>

#include "unit/field_faults/support.h"

namespace fsdpp::test {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kLayerBytes = 4 * kMiB;
constexpr int kLayers = 8;
constexpr int kForwards = 100;

/// Bytes that this thread, so this rank, holds of the CPU allocator's memory.
class AllocationCounter final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t now() const { return now_; }
  int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = now_; }

 private:
  int64_t now_ = 0, peak_ = 0;
};

struct LayerImpl : torch::nn::Module {
  LayerImpl() { w = register_parameter("w", at::zeros({1024, 1024})); }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, w); }
  at::Tensor w;
};
FSDPP_MODULE(Layer);

struct StackImpl : torch::nn::Module {
  StackImpl() {
    for (int i = 0; i < kLayers; ++i) layers.push_back(register_module("layer" + std::to_string(i), Layer()));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer(x) + 1;
    return x;
  }
  std::vector<Layer> layers;
};
FSDPP_MODULE(Stack);

Stack sharded_stack(const std::shared_ptr<Mesh>& mesh) {
  Stack stack;
  for (auto& layer : stack->layers) fully_shard(layer, mesh, {.reshard_after_forward = true});
  fully_shard(stack, mesh);
  return stack;
}

struct Measured {
  AllocationCounter& counter;
  int64_t baseline;  ///< with shards only
};

/// kForwards forwards of the roots in turn: memory between them, its peak in them, and the state of every unit.
void expect_bounded(const std::vector<Stack>& roots, const Measured& memory) {
  const auto x = at::ones({2, 1024});
  int64_t after_fifth = 0;
  memory.counter.reset_peak();
  for (int pass = 1; pass <= kForwards / static_cast<int>(roots.size()); ++pass) {
    for (auto stack : roots) {
      EXPECT_EQ(stack(x)[0][0].item<float>(), 1.0f);
      EXPECT_TRUE(nothing_unsharded(*stack)) << "pass " << pass;
    }
    const auto held = memory.counter.now() - memory.baseline;
    EXPECT_LE(held, 2 * kLayerBytes + kMiB / 16) << "pass " << pass << ": more than the two buffers that are used in turn";
    if (pass == 5) after_fifth = held;
    if (pass > 5) {
      EXPECT_EQ(held, after_fifth) << "pass " << pass;
    }
    EXPECT_LE(reserved_buffer_bytes(*roots[0]), 2 * kLayerBytes);
  }
  EXPECT_LE(memory.counter.peak() - memory.baseline, 4 * kLayerBytes);
  EXPECT_GE(memory.counter.peak() - memory.baseline, kLayerBytes) << "the counter sees no gathered layer";
}

class ForwardOnly : public ::testing::Test {
 protected:
  /// Two ranks, each with its counter and `roots` models of half of 8 · 4 MiB.
  template <class Body>
  static void run(int roots, Body&& body) {
    each_rank(2, [&](std::shared_ptr<World> world) {
      auto counter = std::make_shared<AllocationCounter>();
      c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
      auto mesh = Mesh::shard(world);
      std::vector<Stack> stacks;
      for (int i = 0; i < roots; ++i) stacks.push_back(sharded_stack(mesh));
      int64_t shards = 0;
      for (auto& stack : stacks)
        for (auto& unit : units(*stack)) shards += unit.memory().shard_bytes;
      EXPECT_EQ(shards, roots * kLayers * kLayerBytes / 2);
      const Measured memory{*counter, counter->now()};
      body(stacks, memory);
    });
  }
};

TEST_F(ForwardOnly, PB29_NoGradThenNothingStaysGathered) {
  run(1, [](const std::vector<Stack>& roots, const Measured& memory) {
    at::NoGradGuard no_grad;
    expect_bounded(roots, memory);
  });
}

TEST_F(ForwardOnly, PB29_NoGradWithARootThatReshardsThenNothingStaysGathered) {
  run(1, [](const std::vector<Stack>& roots, const Measured& memory) {
    unit_of(*roots[0]).set_reshard_after_forward(true, /*recurse=*/false);
    at::NoGradGuard no_grad;
    expect_bounded(roots, memory);
  });
}

TEST_F(ForwardOnly, PB29_InferenceModeThenNothingStaysGathered) {
  run(1, [](const std::vector<Stack>& roots, const Measured& memory) {
    const c10::InferenceMode inference;
    expect_bounded(roots, memory);
  });
}

TEST_F(ForwardOnly, PB29_TwoRootsInTurnThenTheyShareTheirBuffers) {
  run(2, [](const std::vector<Stack>& roots, const Measured& memory) {
    at::NoGradGuard no_grad;
    expect_bounded(roots, memory);
  });
}

}  // namespace
}  // namespace fsdpp::test
