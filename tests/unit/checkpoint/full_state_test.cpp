#include "fsdpp/checkpoint/full_state.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "checkpoint/safetensors.h"
#include "fsdpp/api/fully_shard.h"
#include "fsdpp/base/error.h"

namespace fsdpp::dcp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

/// Parameters of every kind that a layout treats differently, a tied one and a buffer.
struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    weight = register_parameter("weight", at::arange(35, at::kFloat).reshape({7, 5}));
    half = register_parameter("half", at::arange(6, at::kHalf));
    scalar = register_parameter("scalar", at::full({}, 4.5f));
    empty = register_parameter("empty", at::full({0, 3}, 1.0f));
    tied = register_parameter("tied", weight);
    counter = register_buffer("counter", at::arange(3));
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight); }
  at::Tensor weight, half, scalar, empty, tied, counter;
};
FSDPP_MODULE(Layer);

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    first = register_module("first", Layer());
    bias = register_parameter("bias", at::full({5}, -1.0f));
  }
  at::Tensor forward(const at::Tensor& x) { return first(x) + bias; }
  Layer first{nullptr};
  at::Tensor bias;
};
FSDPP_MODULE(Model);

void shard(Model& model, const std::shared_ptr<comm::Mesh>& mesh) {
  fully_shard(model->first, mesh);
  fully_shard(model, mesh);
}

void change_everything(Model& model) {
  const at::NoGradGuard no_grad;
  for (auto& p : model->parameters()) p.detach().fill_(99);
  for (auto& b : model->buffers()) b.fill_(99);
}

std::string content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

class FullState : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string saved() const {
    save_full(*Model(), path("plain"));
    return path("plain");
  }
  fs::path folder_ = fs::temp_directory_path() / ("fsdpp_full_" + std::to_string(::getpid()));
};

template <class F>
std::string error_of(F&& body) {
  try {
    body();
  } catch (const CheckpointError& e) {
    return e.what();
  }
  return "no error";
}

TEST_F(FullState, UnshardedModel_FileHoldsEveryTensorOnce) {
  const SafetensorsReader file(saved());
  std::vector<std::string> names;
  for (const auto& e : file.entries()) names.push_back(e.name);
  EXPECT_THAT(names, testing::UnorderedElementsAre("bias", "first.weight", "first.half", "first.scalar", "first.empty", "first.counter"));
  EXPECT_EQ(file.find("first.weight")->sizes, (std::vector<int64_t>{7, 5}));
  EXPECT_EQ(file.find("first.half")->dtype, at::kHalf);
  EXPECT_EQ(file.find("first.counter")->dtype, at::kLong);
}

TEST_F(FullState, UnshardedModel_SaveChangeLoad_GivesTheSameFile) {
  const auto before = content(saved());
  Model model;
  change_everything(model);
  const auto result = load_full(*model, path("plain"));
  EXPECT_TRUE(result.missing.empty() && result.unexpected.empty());
  EXPECT_TRUE(at::equal(model->first->weight, Model()->first->weight));
  save_full(*model, path("again"));
  EXPECT_EQ(content(path("again")), before);
}

class ShardedFullState : public FullState, public testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShardedFullState, testing::Values(1, 2, 3, 9));

TEST_P(ShardedFullState, SavedFile_IsThatOfTheUnshardedModel) {
  const auto expected = content(saved());
  comm::run_local_world(GetParam(), [&](auto world) {
    Model model;
    shard(model, comm::Mesh::shard(world));
    save_full(*model, path("sharded"));
    world->barrier();
    EXPECT_EQ(content(path("sharded")), expected);
  });
}

TEST_P(ShardedFullState, LoadedAfterSharding_SavesTheSameAgain) {
  const auto expected = content(saved());
  comm::run_local_world(GetParam(), [&](auto world) {
    Model model;
    shard(model, comm::Mesh::shard(world));
    change_everything(model);
    load_full(*model, path("plain"));
    save_full(*model, path("sharded"));
    world->barrier();
    EXPECT_EQ(content(path("sharded")), expected);
  });
}

TEST_P(ShardedFullState, LeftUnsharded_SavesAndLoadsAllTheSame) {
  const auto expected = content(saved());
  comm::run_local_world(GetParam(), [&](auto world) {
    Model model;
    shard(model, comm::Mesh::shard(world));
    for (const auto& unit : units(*model)) unit.unshard();
    save_full(*model, path("sharded"));
    for (const auto& unit : units(*model)) unit.unshard();
    load_full(*model, path("plain"));
    EXPECT_TRUE(at::equal(full_tensor(model->first->weight), Model()->first->weight));
    world->barrier();
    EXPECT_EQ(content(path("sharded")), expected);
  });
}

TEST_F(FullState, RankZeroCannotWrite_EveryRankThrows) {
  comm::run_local_world(3, [&](auto world) {
    Model model;
    shard(model, comm::Mesh::shard(world));
    const auto error = error_of([&] { save_full(*model, path("no/such/folder/file")); });
    EXPECT_THAT(error, AllOf(HasSubstr("no/such/folder/file"), HasSubstr("No such file")));
    save_full(*model, path("after"));  // and the ranks are still in step
  });
}

TEST_F(FullState, OneRankCannotRead_EveryRankThrowsAndNothingChanges) {
  saved();
  comm::run_local_world(3, [&](auto world) {
    Model model;
    shard(model, comm::Mesh::shard(world));
    change_everything(model);
    const auto error = error_of([&] { load_full(*model, world->rank() == 1 ? path("gone") : path("plain")); });
    EXPECT_THAT(error, HasSubstr(path("gone")));
    EXPECT_EQ(full_tensor(model->bias)[0].template item<float>(), 99.0f);
  });
}

void write_bias(const std::string& path, std::vector<int64_t> sizes, const std::string& name = "bias") {
  const std::vector<TensorSpec> specs{{name, at::kDouble, std::move(sizes)}};
  const std::vector<double> values{1, 2, 3, 4, 5};
  SafetensorsWriter writer(path, specs);
  writer.write(0, std::as_bytes(std::span(values)));
  writer.commit();
}

TEST_F(FullState, NamesDiffer_StrictListsBothAndChangesNothing) {
  write_bias(path("other"), {5}, "surplus");
  Model model;
  EXPECT_THAT(error_of([&] { load_full(*model, path("other")); }), AllOf(HasSubstr("first.weight, "), HasSubstr("[surplus]")));
  EXPECT_TRUE(at::equal(model->bias, Model()->bias));
}

TEST_F(FullState, NotStrict_LoadsWhatIsThereConvertsAndNamesTheRest) {
  write_bias(path("part"), {5});
  Model model;
  const auto result = load_full(*model, path("part"), false);
  EXPECT_THAT(result.missing, testing::UnorderedElementsAre("first.weight", "first.half", "first.scalar", "first.empty", "first.counter"));
  EXPECT_TRUE(result.unexpected.empty());
  EXPECT_EQ(model->bias.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(model->bias, at::arange(1, 6, at::kFloat)));
}

TEST_F(FullState, WrongShape_IsAnErrorWithBothShapesInEitherMode) {
  write_bias(path("shape"), {1, 5});
  Model model;
  for (bool strict : {true, false})
    EXPECT_THAT(error_of([&] { load_full(*model, path("shape"), strict); }),
                AllOf(HasSubstr("'bias'"), HasSubstr("[1, 5] in the file"), HasSubstr("[5] in the model")));
  EXPECT_TRUE(at::equal(model->bias, Model()->bias));
}

TEST_F(FullState, TiedParameterUnderItsSecondName_IsLoaded) {
  const std::vector<TensorSpec> specs{{"first.tied", at::kFloat, {7, 5}}};
  const std::vector<float> values(35, 2.0f);
  SafetensorsWriter writer(path("tied"), specs);
  writer.write(0, std::as_bytes(std::span(values)));
  writer.commit();
  Model model;
  const auto result = load_full(*model, path("tied"), false);
  EXPECT_TRUE(result.unexpected.empty());
  EXPECT_EQ(model->first->weight[6][4].item<float>(), 2.0f);
}

}  // namespace
}  // namespace fsdpp::dcp
