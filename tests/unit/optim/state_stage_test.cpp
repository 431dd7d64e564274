#include "optim/state_stage.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <set>

namespace fsdpp::optim {
namespace {

/// Ten parameters, a gradient each, two state values each.
struct Arrays {
  at::Tensor param = at::zeros({10});
  at::Tensor grad = at::arange(10).to(at::kFloat);
  at::Tensor first = at::arange(10).to(at::kFloat) * 10;
  at::Tensor second = at::arange(10).to(at::kDouble) * 100;
  [[nodiscard]] FlatRange range() const {
    FlatRange r;
    r.arrays = {array_of(param), array_of(grad), array_of(first), array_of(second), {}};
    r.numel = 10;
    return r;
  }
};

/// param = grad + first + second; each state value + 1.
void work(const FlatRange& r) {
  auto* param = reinterpret_cast<float*>(r.arrays[0].data);
  const auto* grad = reinterpret_cast<const float*>(r.arrays[1].data);
  auto* first = reinterpret_cast<float*>(r.arrays[2].data);
  auto* second = reinterpret_cast<double*>(r.arrays[3].data);
  for (int64_t i = 0; i < r.numel; ++i) {
    param[i] = grad[i] + first[i] + static_cast<float>(second[i]);
    first[i] += 1;
    second[i] += 1;
  }
}

TEST(StateStage, BringsEachPieceAndTakesItBack) {
  for (const int64_t piece : {1, 3, 5, 10, 100}) {
    const Arrays staged;
    const Arrays direct;
    StateStage stage(c10::kCPU, piece);
    for (int step = 0; step < 3; ++step) {
      stage.begin_step();
      stage.update(staged.range(), work);
      work(direct.range());
    }
    stage.synchronize();
    EXPECT_TRUE(staged.param.equal(direct.param)) << piece;
    EXPECT_TRUE(staged.first.equal(direct.first)) << piece;
    EXPECT_TRUE(staged.second.equal(direct.second)) << piece;
  }
}

TEST(StateStage, WorksInTwoPiecesOfMemoryThatAreNotTheHostsOwn) {
  const Arrays arrays;
  StateStage stage(c10::kCPU, 3);
  std::set<const char*> seen;
  std::vector<int64_t> lengths;
  stage.update(arrays.range(), [&](const FlatRange& piece) {
    seen.insert(piece.arrays[2].data);
    lengths.push_back(piece.numel);
    EXPECT_EQ(piece.arrays[4].data, nullptr);
    work(piece);
  });
  EXPECT_EQ(lengths, (std::vector<int64_t>{3, 3, 3, 1}));
  EXPECT_EQ(seen.size(), 2U);
  const auto* host = static_cast<const char*>(arrays.first.data_ptr());
  for (const char* memory : seen) EXPECT_TRUE(memory < host || memory >= host + 10 * 4);
}

}  // namespace
}  // namespace fsdpp::optim
