#include "checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "fsdpp/base/error.h"

namespace fsdpp::dcp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

/// A folder of its own for each test, removed at the end.
class Safetensors : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("fsdpp_st_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name = "a.safetensors") const { return (folder_ / name).string(); }

  std::string write_raw(const std::string& content) const {
    std::ofstream(path(), std::ios::binary) << content;
    return path();
  }
  /// A file with this header text and `data_bytes` zero bytes of data.
  std::string write_file(const std::string& header, size_t data_bytes) const {
    std::string length(8, '\0');
    const uint64_t n = header.size();
    std::memcpy(length.data(), &n, 8);
    return write_raw(length + header + std::string(data_bytes, '\0'));
  }
  static std::string error_of(const std::string& file) {
    try {
      SafetensorsReader reader(file);
    } catch (const CheckpointError& e) {
      return e.what();
    }
    return "no error";
  }
  fs::path folder_;
};

template <class T>
std::span<const std::byte> as_bytes(const std::vector<T>& v) {
  return std::as_bytes(std::span(v));
}

const std::string kPair = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"I64","shape":[1,1],"data_offsets":[8,16]}})";

TEST_F(Safetensors, WrittenThenRead_GivesTheSameBytes) {
  const std::vector<float> floats{1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> whole{-7};
  const std::vector<uint8_t> odd{1, 2, 3};
  const std::vector<TensorSpec> specs{{"odd", c10::kByte, {3}}, {"layer.weight", c10::kFloat, {2, 3}}, {"scalar", c10::kLong, {}},
                                      {"nothing", c10::kHalf, {0, 5}}};
  SafetensorsWriter writer(path(), specs, {{"format", "pt"}});
  writer.write(1, as_bytes(floats));
  writer.write(0, as_bytes(odd));
  writer.write(3, {});
  writer.write(2, as_bytes(whole));
  writer.commit();

  SafetensorsReader reader(path());
  EXPECT_EQ(reader.metadata(), (Metadata{{"format", "pt"}}));
  ASSERT_EQ(reader.entries().size(), 4u);
  const auto* weight = reader.find("layer.weight");
  ASSERT_NE(weight, nullptr);
  EXPECT_EQ(weight->dtype, c10::kFloat);
  EXPECT_EQ(weight->sizes, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(std::memcmp(reader.data(*weight).data(), floats.data(), 24), 0);
  EXPECT_EQ(std::memcmp(reader.data(*reader.find("odd")).data(), odd.data(), 3), 0);
  EXPECT_EQ(std::memcmp(reader.data(*reader.find("scalar")).data(), whole.data(), 8), 0);
  EXPECT_TRUE(reader.find("scalar")->sizes.empty());
  EXPECT_EQ(reader.find("nothing")->bytes(), 0u);
  EXPECT_EQ(reader.find("other"), nullptr);
}

TEST_F(Safetensors, MixedDtypes_EveryTensorIsAlignedToItsElements) {
  const std::vector<TensorSpec> specs{{"b", c10::kByte, {3}}, {"h", c10::kBFloat16, {1}}, {"d", c10::kDouble, {2}}, {"f", c10::kFloat, {1}}};
  SafetensorsWriter writer(path(), specs);
  for (size_t i = 0; i < specs.size(); ++i)
    writer.write(i, as_bytes(std::vector<std::byte>(c10::elementSize(specs[i].dtype) * static_cast<size_t>(specs[i].sizes[0]))));
  writer.commit();
  SafetensorsReader reader(path());
  for (const auto& e : reader.entries())
    EXPECT_EQ(reinterpret_cast<uintptr_t>(reader.data(e).data()) % c10::elementSize(e.dtype), 0u) << e.name;
}

TEST_F(Safetensors, WriterWithoutCommit_LeavesNothingAndTheOldFile) {
  write_raw("old");
  {
    const std::vector<TensorSpec> specs{{"a", c10::kFloat, {1}}};
    SafetensorsWriter writer(path(), specs);
    EXPECT_THROW(writer.commit(), CheckpointError);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}), 1);
  EXPECT_EQ(fs::file_size(path()), 3u);
}

TEST_F(Safetensors, WriterMisused_Throws) {
  const std::vector<TensorSpec> specs{{"a", c10::kFloat, {2}}};
  SafetensorsWriter writer(path(), specs);
  EXPECT_THROW(writer.write(0, as_bytes(std::vector<float>{1})), CheckpointError);
  writer.write(0, as_bytes(std::vector<float>{1, 2}));
  EXPECT_THROW(writer.write(0, as_bytes(std::vector<float>{1, 2})), CheckpointError);
  EXPECT_THROW(writer.write(1, {}), CheckpointError);
  const std::vector<TensorSpec> twice{{"a", c10::kFloat, {2}}, {"a", c10::kFloat, {2}}};
  EXPECT_THROW(SafetensorsWriter(path(), twice), CheckpointError);
  const std::vector<TensorSpec> odd{{"a", c10::kComplexFloat, {2}}};
  EXPECT_THROW(SafetensorsWriter(path(), odd), CheckpointError);
  EXPECT_THROW(SafetensorsWriter(path("no/such/folder/x"), specs), CheckpointError);
}

TEST_F(Safetensors, FullDisk_IsAnErrorNamingTheTensor) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  fs::create_symlink("/dev/full", path() + ".tmp." + std::to_string(::getpid()));
  const std::vector<TensorSpec> specs{{"a", c10::kFloat, {2}}};
  EXPECT_THROW(SafetensorsWriter(path(), specs), CheckpointError);
  EXPECT_FALSE(fs::exists(path()));
}

TEST_F(Safetensors, GoodFiles_AreAccepted) {
  EXPECT_EQ(error_of(write_file(kPair, 16)), "no error");
  EXPECT_EQ(error_of(write_file("{}", 0)), "no error");
  EXPECT_EQ(error_of(write_file(kPair + "     ", 16)), "no error");
}

struct BadFile {
  const char* what;
  std::string header;
  size_t data_bytes;
  std::vector<std::string> expected;  ///< parts of the message
};
class BadSafetensors : public Safetensors, public testing::WithParamInterface<BadFile> {};

TEST_P(BadSafetensors, IsAnErrorNamingFileAndCause) {
  const auto file = write_file(GetParam().header, GetParam().data_bytes);
  const auto error = error_of(file);
  EXPECT_THAT(error, HasSubstr(file));
  for (const auto& part : GetParam().expected) EXPECT_THAT(error, HasSubstr(part));
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"w":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

INSTANTIATE_TEST_SUITE_P(
    All, BadSafetensors,
    testing::Values(
        BadFile{"truncated data", kPair, 15, {"'b'", "ends at byte 16", "only 15"}},
        BadFile{"trailing data", kPair, 17, {"end at byte 16", "has 17"}},
        BadFile{"not json", "{\"a\":", 0, {"not valid JSON"}},
        BadFile{"invalid utf-8", "{\"\xff\":1}", 0, {"not valid JSON"}},
        BadFile{"not an object", "[1]", 0, {"must be a JSON object"}},
        BadFile{"entry is not an object", R"({"w":3})", 0, {"'w'", "no 'dtype'"}},
        BadFile{"no offsets", R"({"w":{"dtype":"F32","shape":[1]}})", 4, {"'w'", "no 'data_offsets'"}},
        BadFile{"bad dtype", one("\"F99\"", "[1]", "[0,4]"), 4, {"'w'", "unknown dtype \"F99\"", "BF16"}},
        BadFile{"dtype is a number", one("32", "[1]", "[0,4]"), 4, {"'w'", "unknown dtype 32"}},
        BadFile{"size mismatch", one("\"F32\"", "[3]", "[0,8]"), 8, {"'w'", "[3] of F32 needs 12 bytes", "hold 8"}},
        BadFile{"negative size", one("\"F32\"", "[-1]", "[0,4]"), 4, {"'w'", "whole numbers", "-1"}},
        BadFile{"fractional size", one("\"F32\"", "[1.5]", "[0,4]"), 4, {"'w'", "whole numbers"}},
        BadFile{"shape is text", one("\"F32\"", "\"1\"", "[0,4]"), 4, {"'w'", "whole numbers"}},
        BadFile{"overflow", one("\"F32\"", "[4611686018427387904,4]", "[0,0]"), 0, {"'w'", "more than 2^64"}},
        BadFile{"reversed offsets", one("\"F32\"", "[1]", "[4,0]"), 4, {"'w'", "begin <= end"}},
        BadFile{"three offsets", one("\"F32\"", "[1]", "[0,4,8]"), 8, {"'w'", "begin <= end"}},
        BadFile{"hole", one("\"F32\"", "[1]", "[4,8]"), 8, {"'w'", "starts at byte 4", "hole"}},
        BadFile{"out of range", one("\"F32\"", "[1]", "[9223372036854775800,9223372036854775804]"), 4, {"'w'", "only 4"}},
        BadFile{"overlap",
                R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12,
                {"'b'", "starts at byte 4", "overlaps"}},
        BadFile{"duplicate tensor",
                R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4,
                {"'a' twice"}},
        BadFile{"duplicate member", R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, {"'dtype' twice"}},
        BadFile{"metadata is no map", R"({"__metadata__":[]})", 0, {"__metadata__"}},
        BadFile{"metadata of numbers", R"({"__metadata__":{"a":1}})", 0, {"__metadata__ 'a'"}}));

TEST_F(Safetensors, BrokenHeaderLength_IsAnErrorNamingTheFile) {
  EXPECT_THAT(error_of(path("missing")), AllOf(HasSubstr(path("missing")), HasSubstr("No such file")));
  EXPECT_THAT(error_of(folder_.string()), HasSubstr("not a regular file"));
  EXPECT_THAT(error_of(write_raw("")), AllOf(HasSubstr(path()), HasSubstr("0 bytes long")));
  EXPECT_THAT(error_of(write_raw("1234567")), HasSubstr("7 bytes long"));
  EXPECT_THAT(error_of(write_raw(std::string("\x09\0\0\0\0\0\0\0{}", 10))), HasSubstr("should be 9 bytes long, but only 2 follow"));
  EXPECT_THAT(error_of(write_raw(std::string(8, '\xff') + "{}")), HasSubstr("truncated, or not a safetensors file"));
}

TEST_F(Safetensors, EveryTruncationOfAGoodFile_IsAnError) {
  const auto file = write_file(kPair, 16);
  std::ifstream in(file, std::ios::binary);
  const std::string content((std::istreambuf_iterator<char>(in)), {});
  for (size_t n = 0; n < content.size(); ++n) EXPECT_NE(error_of(write_raw(content.substr(0, n))), "no error") << n;
}

}  // namespace
}  // namespace fsdpp::dcp
