#include "data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>

#include "fsdpp/base/error.h"

namespace minillm {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
namespace fs = std::filesystem;

class Data : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  std::string write(const std::string& name, const std::string& content) const {
    const auto path = (folder_ / name).string();
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  /// A .bin file of the tokens 0, 1, …, count − 1.
  std::string counting(int count) const {
    std::string bytes;
    for (int i = 0; i < count; ++i) bytes += {static_cast<char>(i & 0xff), static_cast<char>(i >> 8)};
    return write("counting.bin", bytes);
  }
  fs::path folder_ = fs::temp_directory_path() / ("minillm_data_" + std::to_string(::getpid()));
};

std::vector<int64_t> read(const TokenFiles& files, int64_t start, size_t count) {
  std::vector<int64_t> out(count);
  files.read(start, out);
  return out;
}

template <class F>
std::string error_of(F&& body) {
  try {
    body();
  } catch (const fsdpp::Error& e) {
    return e.what();
  }
  return "no error";
}

struct Filled {
  std::vector<int64_t> inputs, targets;
};
Filled fill(BatchSource& source, const BatchShape& shape, int64_t m) {
  Filled f;
  f.inputs.resize(static_cast<size_t>(shape.batch * shape.seq));
  f.targets = f.inputs;
  source.fill(m, f.inputs, f.targets);
  return f;
}

TEST_F(Data, BinFile_IsLittleEndianUint16) {
  const TokenFiles files({write("a.bin", std::string("\x01\x00\xff\x01\x00\x80", 6))}, 65536);
  EXPECT_EQ(files.size(), 3);
  EXPECT_THAT(read(files, 0, 3), ElementsAre(1, 511, 32768));
}

TEST_F(Data, OtherFile_ItsBytesAreTheTokens) {
  const TokenFiles files({write("a.txt", "a\xff\n")}, 256);
  EXPECT_THAT(read(files, 0, 3), ElementsAre('a', 255, '\n'));
}

TEST_F(Data, SeveralFiles_AreOneSequenceInTheGivenOrder) {
  const TokenFiles files({write("b.txt", "xy"), write("empty.txt", ""), write("a.bin", std::string("\x05\x00\x06\x00", 4))}, 256);
  EXPECT_EQ(files.size(), 4);
  EXPECT_THAT(read(files, 1, 3), ElementsAre('y', 5, 6));
}

TEST_F(Data, TokenNotBelowVocab_IsAnErrorNamingFilePositionAndValue) {
  const auto first = write("a.txt", "aa"), second = write("b.bin", std::string("\x05\x00\x00\x01", 4));
  const TokenFiles files({first, second}, 256);
  EXPECT_THAT(error_of([&] { read(files, 0, 4); }), AllOf(HasSubstr(second), HasSubstr("token 1 is 256"), HasSubstr("--vocab 257")));
  EXPECT_THAT(read(files, 0, 3), ElementsAre('a', 'a', 5));
}

TEST_F(Data, UnusableFile_IsAnErrorNamingIt) {
  EXPECT_THAT(error_of([&] { TokenFiles({(folder_ / "gone").string()}, 256); }), AllOf(HasSubstr("gone"), HasSubstr("No such file")));
  EXPECT_THAT(error_of([&] { TokenFiles({folder_.string()}, 256); }), HasSubstr("not a regular file"));
  EXPECT_THAT(error_of([&] { TokenFiles({write("odd.bin", "abc")}, 256); }), AllOf(HasSubstr("odd.bin"), HasSubstr("3 bytes")));
  EXPECT_THAT(error_of([&] { TokenFiles({}, 256); }), HasSubstr("no file"));
  EXPECT_THAT(error_of([&] { (void)file_batches({write("short.txt", "abcd")}, 256, {1, 4, 0, 1}); }), HasSubstr("4 tokens make no sample"));
}

TEST_F(Data, MicroBatches_FollowTheDocumentedIndexing) {
  // 4·7 + 1 tokens: 7 samples of 4.
  const auto path = counting(29);
  for (int world : {1, 2, 3}) {
    for (int rank = 0; rank < world; ++rank) {
      const BatchShape shape{2, 4, rank, world};
      auto source = file_batches({path}, 29, shape);
      for (int64_t m = 0; m < 9; ++m) {
        const auto got = fill(*source, shape, m);
        for (int64_t b = 0; b < 2; ++b) {
          const auto sample = ((m * world + rank) * 2 + b) % 7;
          for (int64_t t = 0; t < 4; ++t) {
            const auto at = static_cast<size_t>(b * 4 + t);
            ASSERT_EQ(got.inputs[at], sample * 4 + t);
            ASSERT_EQ(got.targets[at], sample * 4 + t + 1);
          }
        }
      }
    }
  }
}

TEST_F(Data, OneTokenFewer_LosesTheLastSample) {
  const BatchShape shape{1, 4, 0, 1};
  EXPECT_EQ(fill(*file_batches({counting(9)}, 29, shape), shape, 1).inputs[0], 4);
  EXPECT_EQ(fill(*file_batches({counting(8)}, 29, shape), shape, 1).inputs[0], 0);
}

TEST_F(Data, Shuffle_VisitsEverySampleOnceOverAllRanks) {
  const auto path = counting(4 * 6 + 1);
  const uint64_t seed = 5;
  std::vector<int64_t> firsts;
  for (int rank = 0; rank < 2; ++rank) {
    const BatchShape shape{1, 4, rank, 2};
    auto source = file_batches({path}, 29, shape, &seed);
    for (int64_t m = 0; m < 3; ++m) firsts.push_back(fill(*source, shape, m).inputs[0]);
  }
  EXPECT_THAT(firsts, testing::UnorderedElementsAre(0, 4, 8, 12, 16, 20));
  EXPECT_NE(permutation(1000, 1), permutation(1000, 2));
  auto order = permutation(1000, 1);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(order[static_cast<size_t>(i)], i);
  EXPECT_TRUE(permutation(0, 1).empty());
  EXPECT_THAT(permutation(1, 1), ElementsAre(0));
}

TEST(Permutation, KnownSeed_GivesTheSameOrderOnEveryMachine) {
  EXPECT_THAT(permutation(8, 42), ElementsAre(0, 1, 3, 4, 5, 7, 6, 2));
}

TEST(Synthetic, DependsOnSeedMicroBatchAndRankAlone) {
  const BatchShape shape{2, 64, 1, 4};
  const auto base = fill(*synthetic_batches(7, 1000, shape), shape, 5);
  EXPECT_EQ(fill(*synthetic_batches(7, 1000, shape), shape, 5).inputs, base.inputs);
  EXPECT_NE(fill(*synthetic_batches(8, 1000, shape), shape, 5).inputs, base.inputs);
  EXPECT_NE(fill(*synthetic_batches(7, 1000, shape), shape, 6).inputs, base.inputs);
  const BatchShape other{2, 64, 2, 4};
  EXPECT_NE(fill(*synthetic_batches(7, 1000, other), other, 5).inputs, base.inputs);
  for (size_t i = 0; i + 1 < 64; ++i) EXPECT_EQ(base.targets[i], base.inputs[i + 1]);
}

TEST(Synthetic, TokensAreUniform) {
  const BatchShape shape{16, 1024, 0, 1};
  const auto tokens = fill(*synthetic_batches(1, 10, shape), shape, 0).inputs;
  std::vector<int> count(10);
  for (auto t : tokens) ++count.at(static_cast<size_t>(t));
  const double expected = static_cast<double>(tokens.size()) / 10;
  double chi2 = 0;
  for (auto c : count) chi2 += (c - expected) * (c - expected) / expected;
  EXPECT_LT(chi2, 27.9);  // 9 degrees of freedom, 99.9 %
}

TEST(LibtorchHeaders, AreSortedTextOfAFewMegabytes) {
  const auto headers = libtorch_headers();
  ASSERT_FALSE(headers.empty());
  EXPECT_TRUE(std::is_sorted(headers.begin(), headers.end()));
  const TokenFiles files(headers, 256);
  EXPECT_GT(files.size(), 1 << 20);
  EXPECT_LE(files.size(), 4 << 20);
  EXPECT_NO_THROW(read(files, 0, static_cast<size_t>(files.size())));
}

/// Micro-batch m holds m everywhere; throws at `bad`.
class CountingSource : public BatchSource {
 public:
  explicit CountingSource(int64_t bad = -1, std::atomic<int>* filled = nullptr) : bad_(bad), filled_(filled) {}
  void fill(int64_t m, std::span<int64_t> inputs, std::span<int64_t> targets) override {
    if (m == bad_) throw fsdpp::ConfigError("bad micro-batch");
    std::fill(inputs.begin(), inputs.end(), m);
    std::fill(targets.begin(), targets.end(), -m);
    if (filled_ != nullptr) ++*filled_;
  }

 private:
  int64_t bad_;
  std::atomic<int>* filled_;
};

TEST(LoaderThread, GivesAllMicroBatchesInOrderThenAnError) {
  Loader loader(std::make_unique<CountingSource>(), {2, 3, 0, 1}, 20, c10::kCPU);
  for (int64_t m = 0; m < 20; ++m) {
    const auto batch = loader.next();
    EXPECT_EQ(batch.inputs.sizes(), (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(batch.inputs.data_ptr<int64_t>()[5], m);
    EXPECT_EQ(batch.targets.data_ptr<int64_t>()[0], -m);
  }
  EXPECT_THROW((void)loader.next(), fsdpp::UsageError);
}

TEST(LoaderThread, FailureOfTheSource_ArrivesAfterTheGoodOnes) {
  Loader loader(std::make_unique<CountingSource>(2), {1, 1, 0, 1}, 20, c10::kCPU);
  (void)loader.next();
  (void)loader.next();
  EXPECT_THROW((void)loader.next(), fsdpp::ConfigError);
  EXPECT_THROW((void)loader.next(), fsdpp::ConfigError);
}

TEST(LoaderThread, DestroyedEarly_StopsWithAFullQueue) {
  std::atomic<int> filled{0};
  {
    Loader loader(std::make_unique<CountingSource>(-1, &filled), {1, 1, 0, 1}, 1'000'000, c10::kCPU);
    (void)loader.next();
    while (filled < 3) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_LE(filled, 6);  // a few ahead, not all
}

}  // namespace
}  // namespace minillm
