#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "unit/kernels/device_array.h"

/// Every kernel against its CPU twin, bit for bit where the arithmetic is the same, on odd sizes and misaligned
/// pointers, with bytes around each output that must not change. Fails without a device.
namespace fsdpp::kernels {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, 8, 63, 4095, 4096, 4097, 100003};

TEST(KernelsGpu, ADeviceIsPresent) {
  int count = 0;
  expect_success(cudaGetDeviceCount(&count));
  ASSERT_GT(count, 0);
}

TEST(KernelsGpu, CastMatchesCpuForAllDtypesSizesAndAlignments) {
  for (const DType to : kAll) {
    for (const DType from : kAll) {
      for (const int64_t n : kSizes) {
        for (const auto& [dst_shift, src_shift] : {std::pair{0, 0}, {3, 3}, {1, 0}, {0, 5}}) {
          for (const bool accumulate : {false, true}) {
            const Bytes src = random_values(from, n, 1, 100);
            Bytes expected = random_values(to, n, 2);
            DeviceArray in(from, n, src_shift);
            DeviceArray out(to, n, dst_shift);
            in.write(src);
            out.write(expected);
            const double scale = accumulate ? 0.3 : dst_shift == 1 ? 1.0 : 1.7;
            cast_cpu({expected.data(), to, src.data(), from, n, scale, accumulate});
            expect_success(cast({out.data(), to, in.data(), from, n, scale, accumulate}, nullptr));
            ASSERT_EQ(first_difference(out.read(), expected, to), -1) << describe(to, from, n, dst_shift);
            ASSERT_TRUE(out.guards_untouched()) << describe(to, from, n, dst_shift);
          }
        }
      }
    }
  }
}

TEST(KernelsGpu, CastRoundsSpecialValuesAsTheCpu) {
  std::vector<float> values{0.0F,       -0.0F,    INFINITY, -INFINITY,     NAN,           65504.0F,
                            65519.996F, 65520.0F, 1e-8F,    5.9604645e-8F, 2.9802322e-8F, 3.4e38F};
  std::mt19937 random(5);
  for (int k = 0; k < 100000; ++k) {
    const uint32_t bits = static_cast<uint32_t>(random());
    float x = 0;
    std::memcpy(&x, &bits, sizeof x);
    values.push_back(x);
  }
  const auto n = static_cast<int64_t>(values.size());
  DeviceArray in(DType::F32, n, 0);
  Bytes src(values.size() * sizeof(float));
  std::memcpy(src.data(), values.data(), src.size());
  in.write(src);
  for (const DType to : {DType::F16, DType::BF16}) {
    DeviceArray out(to, n, 0);
    Bytes expected(static_cast<size_t>(n) * 2);
    cast_cpu({expected.data(), to, values.data(), DType::F32, n});
    expect_success(cast({out.data(), to, in.data(), DType::F32, n}, nullptr));
    const int64_t where = first_difference(out.read(), expected, to);
    ASSERT_EQ(where, -1) << values[static_cast<size_t>(std::max<int64_t>(where, 0))];
  }
}

TEST(KernelsGpu, CastInPlaceScales) {
  Bytes expected = random_values(DType::F32, 10001, 3);
  DeviceArray x(DType::F32, 10001, 1);
  x.write(expected);
  cast_cpu({expected.data(), DType::F32, expected.data(), DType::F32, 10001, 0.1});
  expect_success(cast({x.data(), DType::F32, x.data(), DType::F32, 10001, 0.1}, nullptr));
  EXPECT_EQ(first_difference(x.read(), expected, DType::F32), -1);
}

/// 250 pieces of odd lengths (three launches), some of them zeros, packed in bf16 from fp32 and in equal dtypes.
TEST(KernelsGpu, PackOfManyPiecesMatchesCpu) {
  for (const DType from : {DType::F32, DType::BF16}) {
    for (const bool accumulate : {false, true}) {
      std::mt19937 random(11);
      std::vector<PackPiece> host;
      std::vector<PackPiece> device;
      const int64_t source_numel = 50000;
      const Bytes source = random_values(from, source_numel, 4);
      DeviceArray in(from, source_numel, 0);
      in.write(source);
      int64_t end = 5;
      for (int k = 0; k < 250; ++k) {
        const int64_t n = k % 11 == 0 ? 9000 + k : static_cast<int64_t>(random() % 300);
        const int64_t begin = static_cast<int64_t>(random() % 30000);
        const size_t at = static_cast<size_t>(begin) * size_of(from);
        const bool zero = k % 7 == 3;
        host.push_back({zero ? nullptr : source.data() + at, end, n});
        device.push_back({zero ? nullptr : static_cast<char*>(in.data()) + at, end, n});
        end += n + static_cast<int64_t>(random() % 3);
      }
      Bytes expected = random_values(DType::BF16, end + 3, 6);
      DeviceArray out(DType::BF16, end + 3, 0);
      out.write(expected);
      pack_cpu({expected.data(), DType::BF16, from, host.data(), 250, accumulate ? 0.5 : 1.0, accumulate});
      expect_success(
          pack({out.data(), DType::BF16, from, device.data(), 250, accumulate ? 0.5 : 1.0, accumulate}, nullptr));
      EXPECT_EQ(first_difference(out.read(), expected, DType::BF16), -1) << accumulate;
      EXPECT_TRUE(out.guards_untouched());
    }
  }
}

struct StepCase {
  DType param, grad;
  int64_t numel, shift;
  bool third;  // AMSGrad; Nesterov's momentum
};

/// An array on the host and its twin on the device.
struct Pair {
  DType dtype;
  Bytes host;
  DeviceArray device;
  Pair(DType t, const StepCase& c, uint32_t seed, bool zeros = false)
      : dtype(t),
        host(zeros ? Bytes(static_cast<size_t>(c.numel) * size_of(t), 0) : random_values(t, c.numel, seed)),
        device(t, c.numel, c.shift) {
    device.write(host);
  }
  void expect_equal(const std::string& what) const {
    ASSERT_EQ(first_difference(device.read(), host, dtype), -1) << what;
    ASSERT_TRUE(device.guards_untouched()) << what;
  }
};

DType wide(DType dtype) { return dtype == DType::F64 ? DType::F64 : DType::F32; }

void expect_adamw_matches(const StepCase& c) {
  Pair p(c.param, c, 1), g(c.grad, c, 2), m(wide(c.param), c, 3), v(wide(c.param), c, 4, true),
      largest(wide(c.param), c, 5, true);
  for (int64_t step = 1; step <= 3; ++step) {
    AdamWArgs host;
    host.param = p.host.data(), host.param_dtype = c.param, host.grad = g.host.data(), host.grad_dtype = c.grad;
    host.exp_avg = m.host.data(), host.exp_avg_sq = v.host.data(), host.numel = c.numel, host.step = step;
    host.grad_scale = step == 2 ? -0.5 : 1.0 / static_cast<double>(step);
    if (c.third) host.max_exp_avg_sq = largest.host.data();
    AdamWArgs device = host;
    device.param = p.device.data(), device.grad = g.device.data();
    device.exp_avg = m.device.data(), device.exp_avg_sq = v.device.data();
    if (c.third) device.max_exp_avg_sq = largest.device.data();
    adamw_cpu(host);
    expect_success(adamw(device, nullptr));
  }
  for (const Pair* pair : {&p, &g, &m, &v, &largest})
    ASSERT_NO_FATAL_FAILURE(pair->expect_equal(describe(c.param, c.grad, c.numel, c.shift)));
}

void expect_sgd_matches(const StepCase& c, bool momentum, double decay) {
  Pair p(c.param, c, 1), g(c.grad, c, 2), b(wide(c.param), c, 3);
  for (int step = 0; step < 3; ++step) {
    SGDArgs host;
    host.param = p.host.data(), host.param_dtype = c.param, host.grad = g.host.data(), host.grad_dtype = c.grad;
    host.numel = c.numel, host.lr = 0.1, host.weight_decay = decay, host.grad_scale = 0.7, host.first = step == 0;
    if (momentum) host.momentum_buffer = b.host.data(), host.momentum = 0.9, host.dampening = c.third ? 0 : 0.3;
    host.nesterov = momentum && c.third;
    SGDArgs device = host;
    device.param = p.device.data(), device.grad = g.device.data();
    if (momentum) device.momentum_buffer = b.device.data();
    sgd_cpu(host);
    expect_success(sgd(device, nullptr));
  }
  for (const Pair* pair : {&p, &g, &b})
    ASSERT_NO_FATAL_FAILURE(pair->expect_equal(describe(c.param, c.grad, c.numel, c.shift)));
}

/// Every pair of dtypes, odd lengths, aligned and not.
template <class Expect>
void for_step_cases(Expect expect) {
  for (const DType param : kAll) {
    for (const DType grad : kAll) {
      for (const int64_t n : {1, 5, 1023, 100003}) {
        for (const int64_t shift : {0, 1}) ASSERT_NO_FATAL_FAILURE(expect(StepCase{param, grad, n, shift, n != 1023}));
      }
    }
  }
}

TEST(KernelsGpu, AdamWMatchesCpuBitForBit) { for_step_cases(expect_adamw_matches); }

TEST(KernelsGpu, SGDMatchesCpuBitForBit) {
  for_step_cases(
      [](const StepCase& c) { expect_sgd_matches(c, c.shift == 0 || c.numel == 5, c.numel == 1023 ? 0 : 0.1); });
}

double device_norm(const Bytes& values, DType dtype, double p, double start, int64_t shift) {
  const auto n = static_cast<int64_t>(values.size() / size_of(dtype));
  DeviceArray src(dtype, n, shift), result(DType::F64, 1, 0);
  DeviceArray scratch(DType::F64, static_cast<int64_t>(norm_scratch_bytes() / sizeof(double)), 0);
  src.write(values);
  Bytes bytes(sizeof(double));
  std::memcpy(bytes.data(), &start, sizeof(double));
  result.write(bytes);
  const int error =
      norm_accumulate({src.data(), dtype, n, p, static_cast<double*>(result.data()), scratch.data()}, nullptr);
  EXPECT_EQ(error, 0);
  EXPECT_TRUE(scratch.guards_untouched());
  EXPECT_TRUE(result.guards_untouched());
  return widen(result.read(), DType::F64)[0];
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(KernelsGpu, NormMatchesCpuAndRepeatsBitForBit) {
  for (const DType dtype : kAll) {
    for (const double p : {0.5, 1.0, 2.0, 3.0, kInfinity}) {
      for (const int64_t n : {0, 1, 9, 4097, 3000001}) {
        const Bytes values = random_values(dtype, n, 9);
        double expected = 1.5;
        norm_accumulate_cpu({values.data(), dtype, n, p, &expected, nullptr});
        const double actual = device_norm(values, dtype, p, 1.5, 0);
        EXPECT_NEAR(actual, expected, 1e-12 * expected) << p << " " << describe(dtype, dtype, n, 0);
        EXPECT_EQ(device_norm(values, dtype, p, 1.5, 0), actual);
        EXPECT_EQ(device_norm(values, dtype, p, 1.5, 1), actual);  // alignment does not change the order of additions
      }
    }
  }
}

TEST(KernelsGpu, NormCarriesNanAndInfinity) {
  for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
    for (const size_t where : {size_t{0}, size_t{70001}, size_t{99999}}) {
      Bytes values = random_values(DType::F32, 100000, 9);
      const float infinity = INFINITY;
      const float nan = NAN;
      std::memcpy(&values[where * 4], &infinity, 4);
      EXPECT_EQ(device_norm(values, DType::F32, p, 0, 0), kInfinity);
      std::memcpy(&values[where * 4], &nan, 4);
      EXPECT_TRUE(std::isnan(device_norm(values, DType::F32, p, 0, 0))) << p;
      EXPECT_TRUE(std::isnan(device_norm(random_values(DType::F32, 10, 1), DType::F32, p, std::nan(""), 0)));
    }
  }
}

TEST(KernelsGpu, ScaleByMatchesCpu) {
  for (const DType dtype : kAll) {
    for (const double coefficient : {0.37, 1.0, 0.0, static_cast<double>(NAN)}) {
      for (const int64_t n : kSizes) {
        for (const int64_t shift : {0, 3}) {
          Bytes expected = random_values(dtype, n, 4);
          DeviceArray x(dtype, n, shift), factor(DType::F64, 1, 0);
          x.write(expected);
          Bytes bytes(sizeof(double));
          std::memcpy(bytes.data(), &coefficient, sizeof(double));
          factor.write(bytes);
          scale_by_cpu(expected.data(), dtype, n, &coefficient);
          expect_success(scale_by(x.data(), dtype, n, static_cast<const double*>(factor.data()), nullptr));
          ASSERT_EQ(first_difference(x.read(), expected, dtype), -1)
              << describe(dtype, dtype, n, shift) << " by " << coefficient;
          ASSERT_TRUE(x.guards_untouched());
        }
      }
    }
  }
}

TEST(KernelsGpu, TheComparisonItselfCanFail) {
  Bytes a = random_values(DType::F32, 100, 1);
  Bytes b = a;
  b[57 * 4] ^= 1;
  EXPECT_EQ(first_difference(a, b, DType::F32), 57);
  DeviceArray x(DType::F32, 10, 0);
  expect_success(cudaMemset(static_cast<char*>(x.data()) + 40, 0, 1));
  EXPECT_FALSE(x.guards_untouched());
}

}  // namespace
}  // namespace fsdpp::kernels
