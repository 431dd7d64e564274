// The format in both directions against Python's safetensors package, live.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/add.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>

#include "checkpoint/safetensors.h"

namespace fsdpp::dcp {
namespace {

int run_peer(const std::string& mode, const std::string& path) {
  return std::system((std::string("'" FSDPP_ORACLE_PYTHON "' '" FSDPP_PEER_SCRIPT "' ") + mode + " '" + path + "'").c_str());
}

/// The same as known_tensors() in safetensors_peer.py.
std::map<std::string, at::Tensor> known_tensors() {
  std::map<std::string, at::Tensor> result;
  const auto floats = at::arange(6, at::kFloat).reshape({2, 3}).sub(2.5);
  for (auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e5m2})
    result["float." + dtype_name(dtype)] = floats.to(dtype);
  const auto whole = at::tensor({1, 2, 100}).reshape({1, 3, 1});
  for (auto dtype : {at::kLong, at::kInt, at::kShort, at::kChar, at::kByte}) result["int." + dtype_name(dtype)] = whole.to(dtype);
  result["bool"] = at::tensor({1, 0, 1}).to(at::kBool);
  result["scalar"] = at::tensor(3.25f).reshape({});
  result["empty"] = at::zeros({0, 4});
  return result;
}

void write_known(const std::string& path, const std::map<std::string, at::Tensor>& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, t] : tensors) specs.push_back({name, t.scalar_type(), t.sizes().vec()});
  SafetensorsWriter writer(path, specs, {{"format", "pt"}});
  size_t i = 0;
  for (const auto& [name, t] : tensors) writer.write(i++, {static_cast<const std::byte*>(t.const_data_ptr()), t.nbytes()});
  writer.commit();
}

class SafetensorsPython : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }
  std::string path_ = (std::filesystem::temp_directory_path() / ("fsdpp_py_" + std::to_string(::getpid()))).string();
};

TEST_F(SafetensorsPython, ReadsWhatWeWrite) {
  write_known(path_, known_tensors());
  EXPECT_EQ(run_peer("check", path_), 0);
}

TEST_F(SafetensorsPython, OneWrongValue_IsSeenByTheCheck) {
  auto tensors = known_tensors();
  tensors["float.BF16"] = tensors["float.BF16"].add(1);
  write_known(path_, tensors);
  EXPECT_NE(run_peer("check", path_), 0);
}

TEST_F(SafetensorsPython, WritesWhatWeRead) {
  ASSERT_EQ(run_peer("write", path_), 0);
  const SafetensorsReader reader(path_);
  const auto expected = known_tensors();
  EXPECT_EQ(reader.entries().size(), expected.size());
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  for (const auto& [name, want] : expected) {
    const auto* entry = reader.find(name);
    ASSERT_NE(entry, nullptr) << name;
    EXPECT_EQ(entry->dtype, want.scalar_type()) << name;
    EXPECT_EQ(entry->sizes, want.sizes().vec()) << name;
    const auto data = reader.data(*entry);
    ASSERT_EQ(data.size(), want.nbytes()) << name;
    EXPECT_TRUE(data.empty() || std::memcmp(data.data(), want.const_data_ptr(), data.size()) == 0) << name;
  }
}

}  // namespace
}  // namespace fsdpp::dcp
