// Full states between worlds of other sizes, and files that do not fit the model.
#include <gmock/gmock.h>
#include <torch/optim/adam.h>

#include "fsdpp/base/error.h"
#include "unit/field_faults/support.h"

namespace fsdpp::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Uneven : torch::nn::Module {
  explicit Uneven(int64_t rows, bool filled = true) {
    for (auto& [name, sizes] : shapes(rows)) {
      const auto n = c10::multiply_integers(sizes);
      p.push_back(register_parameter(name, filled ? at::arange(n, at::kFloat).view(sizes) : at::full(sizes, -1.0)));
    }
  }
  static std::vector<std::pair<std::string, std::vector<int64_t>>> shapes(int64_t rows) {
    return {{"W", {5 * rows, 3}}, {"b", {7 * rows}}, {"s", {1}}, {"E", {2 * rows, 4}}};
  }
  at::Tensor forward() { return p[0].sum() + p[1].sum() + p[2].sum() + p[3].sum(); }
  std::vector<at::Tensor> p;
};

std::vector<at::Tensor> full_parameters(const Uneven& m) {
  std::vector<at::Tensor> result;
  for (auto& p : m.p) result.push_back(full_tensor(p));
  return result;
}

std::vector<at::Tensor> train_and_save(int ranks, int64_t rows, const std::string& path) {
  std::vector<at::Tensor> saved;
  each_rank(ranks, [&](std::shared_ptr<World> world) {
    auto m = std::make_shared<Uneven>(rows);
    fully_shard(m, Mesh::shard(world));
    torch::optim::Adam adam(m->parameters(), torch::optim::AdamOptions(0.1));
    for (int step = 0; step < 2; ++step) {
      adam.zero_grad();
      (call(*m) * (world->rank() + 1)).backward();
      adam.step();
    }
    full_state::save_full(*m, path);
    auto full = full_parameters(*m);
    if (world->rank() == 0) saved = full;
  });
  return saved;
}

// The parameters' part of the case: optimizer state is not in a full state. Parameters of the case's sizes each have one owner; with 64
// times the rows they are cut between all ranks.
class FullStateBetweenWorlds : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Rows, FullStateBetweenWorlds, ::testing::Values(1, 64));

TEST_P(FullStateBetweenWorlds, PB20_SavedOnNRanksThenLoadsBitEqualOnM) {
  const TempFolder folder;
  const auto path = folder.file("resized");
  for (auto [n, m] : {std::pair{2, 3}, {3, 2}, {1, 4}, {4, 1}, {2, 2}}) {
    SCOPED_TRACE(std::to_string(n) + " to " + std::to_string(m));
    const auto saved = train_and_save(n, GetParam(), path);
    ASSERT_EQ(saved.size(), 4U);
    for (auto& p : saved)
      EXPECT_TRUE(at::allclose(p.reshape({-1}), at::arange(p.numel(), at::kFloat) - 0.2, 1e-6, 1e-5)) << "two steps of 0.1";
    each_rank(m, [&](std::shared_ptr<World> world) {
      auto loaded = std::make_shared<Uneven>(GetParam(), /*filled=*/false);
      fully_shard(loaded, Mesh::shard(world));
      const auto names = full_state::load_full(*loaded, path);
      EXPECT_TRUE(names.missing.empty() && names.unexpected.empty());
      const auto full = full_parameters(*loaded);
      for (size_t i = 0; i < full.size(); ++i) EXPECT_TRUE(at::equal(full[i], saved[i])) << i;
      (call(*loaded) * (world->rank() + 1)).backward();  // and it trains on
      for (auto& p : loaded->p) EXPECT_TRUE(all_equal(full_grad(p), mean_weight(world->size())));
    });
  }
}

struct Named : torch::nn::Module {
  explicit Named(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
    for (auto& [name, value] : parameters) register_parameter(name, value.clone());
  }
  at::Tensor forward() { return parameters()[0].sum(); }
};

class MismatchedKeys : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    run([&](std::shared_ptr<World>, auto shard) {
      full_state::save_full(*shard({{"a", at::full({4}, 1.0)}, {"b", at::full({4}, 2.0)}}), path_);
    });
  }
  template <class Body>
  void run(Body&& body) const {
    each_rank(GetParam(), [&](std::shared_ptr<World> world) {
      body(world, [&](const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
        auto m = std::make_shared<Named>(parameters);
        fully_shard(m, Mesh::shard(world));
        return m;
      });
    });
  }
  std::string error_of_load(Named& m, bool strict) const {
    try {
      full_state::load_full(m, path_, strict);
    } catch (const CheckpointError& e) {
      return e.what();
    }
    return "no error";
  }
  static void expect_value(const Named& m, const std::string& name, double value) {
    auto full = full_tensor(m.named_parameters()[name]);
    EXPECT_TRUE(at::equal(full, at::full_like(full, value))) << name << ": " << full;
  }
  const TempFolder folder_;
  const std::string path_ = folder_.file("keys");
};
INSTANTIATE_TEST_SUITE_P(Ranks, MismatchedKeys, ::testing::Values(1, 2));

TEST_P(MismatchedKeys, PB22_StrictThenBothListsOnEveryRankAndNothingChanges) {
  run([&](std::shared_ptr<World>, auto shard) {
    auto m = shard({{"a", at::full({4}, 5.0)}, {"c", at::full({4}, 7.0)}});
    EXPECT_THAT(error_of_load(*m, true), AllOf(HasSubstr("Missing in the file: [c]"), HasSubstr("Not in the model: [b]")));
    expect_value(*m, "a", 5);
    expect_value(*m, "c", 7);
  });
}

TEST_P(MismatchedKeys, PB22_NonStrictThenLoadsWhatIsThereAndReturnsBothLists) {
  run([&](std::shared_ptr<World>, auto shard) {
    auto m = shard({{"a", at::full({4}, 5.0)}, {"c", at::full({4}, 7.0)}});
    const auto names = full_state::load_full(*m, path_, false);
    EXPECT_THAT(names.missing, ElementsAre("c"));
    EXPECT_THAT(names.unexpected, ElementsAre("b"));
    expect_value(*m, "a", 1);
    expect_value(*m, "c", 7);
  });
}

TEST_P(MismatchedKeys, PB22_WrongShapeThenAnErrorWithBothShapesInEitherMode) {
  run([&](std::shared_ptr<World>, auto shard) {
    for (bool strict : {true, false}) {
      auto m = shard({{"b", at::full({4}, 6.0)}, {"a", at::full({5}, 5.0)}});
      EXPECT_THAT(error_of_load(*m, strict), AllOf(HasSubstr("'a'"), HasSubstr("[4] in the file"), HasSubstr("[5] in the model")));
      expect_value(*m, "a", 5);
      expect_value(*m, "b", 6);
      auto alone = shard({{"a", at::full({5}, 5.0)}});
      EXPECT_THAT(error_of_load(*alone, strict), AllOf(HasSubstr("[4] in the file"), HasSubstr("[5] in the model")));
      expect_value(*alone, "a", 5);
    }
  });
}

}  // namespace
}  // namespace fsdpp::test
