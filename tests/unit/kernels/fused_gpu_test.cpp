#include <functional>
#include <utility>

#include "kernels/activation.h"
#include "kernels/column_sums.h"
#include "kernels/cross_entropy.h"
#include "kernels/rms_norm.h"
#include "unit/kernels/device_array.h"

/// The kernels that compute sums over rows, or exponentials, against their CPU twins: within a rounding to the dtype, with
/// bytes around each output that must not change; and bit for bit against themselves.
namespace fsdpp::kernels {
namespace {

/// An array on the host and its twin on the device, `shift` elements off alignment.
struct Twin {
  DType dtype;
  Bytes host;
  DeviceArray device;
  Twin(DType t, int64_t numel, int64_t shift, uint32_t seed, double spread = 1.0)
      : dtype(t), host(random_values(t, numel, seed, spread)), device(t, numel, shift) {
    device.write(host);
  }
};

double unit(DType t) { return t == DType::F64 ? 0x1p-52 : t == DType::F32 ? 0x1p-23 : t == DType::F16 ? 0x1p-10 : 0x1p-7; }

/// Each element within a step of its dtype, and within `arithmetic` of the largest.
::testing::AssertionResult same(const Bytes& got, const Bytes& want, DType dtype, double arithmetic) {
  const auto x = widen(got, dtype), y = widen(want, dtype);
  double largest = 0;
  for (const double v : y) largest = std::max(largest, std::isfinite(v) ? std::fabs(v) : 0);
  for (size_t i = 0; i < x.size(); ++i) {
    const bool equal = x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]));
    const double bound = std::fabs(y[i]) * unit(dtype) * 1.01 + largest * arithmetic + (dtype == DType::F16 ? 0x1p-24 : 0);
    if (!equal && !(std::fabs(x[i] - y[i]) <= bound))
      return ::testing::AssertionFailure() << "element " << i << ": " << x[i] << ", expected " << y[i] << ", bound " << bound;
  }
  return ::testing::AssertionSuccess();
}

double arithmetic(DType t) { return t == DType::F64 ? 1e-14 : 3e-6; }

void expect_same(const Twin& twin, const std::string& what) {
  ASSERT_TRUE(same(twin.device.read(), twin.host, twin.dtype, arithmetic(twin.dtype))) << what;
  ASSERT_TRUE(twin.device.guards_untouched()) << what;
}

struct NormCase {
  DType dtype;
  int64_t rows, dim, shift;
  std::string describe() const {
    return "dtype " + std::to_string(static_cast<int>(dtype)) + " rows " + std::to_string(rows) + " dim " + std::to_string(dim) +
           " shift " + std::to_string(shift);
  }
};

/// All widths with few rows; some with so many that each group of threads takes several.
void for_norm_cases(const std::function<void(const NormCase&)>& expect) {
  constexpr int64_t kDims[] = {1, 7, 8, 32, 64, 100, 128, 768, 1000, 2048, 2049, 4096, 5120, 8192, 8200, 12345, 16384};
  for (const DType dtype : kAll)
    for (const int64_t dim : kDims)
      for (const int64_t rows : {1, 3})
        for (const int64_t shift : {0, 1}) ASSERT_NO_FATAL_FAILURE(expect({dtype, rows, dim, shift}));
  constexpr std::pair<int64_t, int64_t> kLong[] = {{9000, 8}, {9000, 64}, {1700, 2048}, {700, 2049}, {400, 8192}};
  for (const DType dtype : {DType::BF16, DType::F32})
    for (const auto& [rows, dim] : kLong) ASSERT_NO_FATAL_FAILURE(expect({dtype, rows, dim, 0}));
}

TEST(FusedGpu, RmsNormMatchesCpu) {
  for_norm_cases([](const NormCase& c) {
    const int64_t n = c.rows * c.dim;
    for (const bool add : {false, true}) {
      Twin x(c.dtype, n, c.shift, 1, 3), residual(c.dtype, n, c.shift, 2), weight(c.dtype, c.dim, c.shift, 3);
      Twin sum(c.dtype, n, c.shift, 4), normed(c.dtype, n, c.shift, 5), rstd(compute_type(c.dtype), c.rows, 0, 6);
      RmsNormArgs host{x.host.data(),
                       add ? residual.host.data() : nullptr,
                       weight.host.data(),
                       add ? sum.host.data() : nullptr,
                       normed.host.data(),
                       rstd.host.data(),
                       c.dtype,
                       c.rows,
                       c.dim,
                       1e-6};
      RmsNormArgs device = host;
      device.x = x.device.data(), device.residual = add ? residual.device.data() : nullptr, device.weight = weight.device.data();
      device.sum = add ? sum.device.data() : nullptr, device.normed = normed.device.data(), device.rstd = rstd.device.data();
      rms_norm_cpu(host);
      expect_success(rms_norm(device, nullptr));
      ASSERT_EQ(first_difference(sum.device.read(), sum.host, c.dtype), -1) << c.describe();  // exact: one addition
      for (const Twin* t : {&x, &residual, &weight, &sum, &normed, &rstd}) ASSERT_NO_FATAL_FAILURE(expect_same(*t, c.describe()));
    }
  });
}

/// Which of the optional arrays take part.
struct BackwardParts {
  bool grad_sum, grad_x, grad_weight, in_place, accumulate;
};

void expect_norm_backward(const NormCase& c, const BackwardParts& parts, DType weight_dtype) {
  const int64_t n = c.rows * c.dim;
  Twin grad(c.dtype, n, c.shift, 1), other(c.dtype, n, c.shift, 2), sum(c.dtype, n, c.shift, 3),
      weight(c.dtype, c.dim, c.shift, 4);
  Twin rstd(compute_type(c.dtype), c.rows, 0, 5), grad_x(c.dtype, n, c.shift, 6), grad_weight(weight_dtype, c.dim, c.shift, 7);
  DeviceArray scratch(DType::F64, static_cast<int64_t>(rms_norm_scratch_bytes(c.rows, c.dim, c.dtype) / 8 + 1), 0);
  const auto args = [&](auto data) {
    RmsNormBackwardArgs a;
    a.grad_normed = data(grad), a.grad_sum = parts.grad_sum ? data(other) : nullptr, a.sum = data(sum), a.weight = data(weight);
    a.rstd = data(rstd), a.grad_x = !parts.grad_x ? nullptr : parts.in_place ? data(grad) : data(grad_x);
    a.grad_weight = parts.grad_weight ? data(grad_weight) : nullptr, a.grad_weight_dtype = weight_dtype;
    a.accumulate = parts.accumulate, a.dtype = c.dtype, a.rows = c.rows, a.dim = c.dim;
    return a;
  };
  rms_norm_backward_cpu(args([](Twin& t) -> void* { return t.host.data(); }));
  auto device = args([](Twin& t) { return t.device.data(); });
  device.scratch = scratch.data();
  expect_success(rms_norm_backward(device, nullptr));
  for (const Twin* t : {&grad, &other, &sum, &weight, &rstd, &grad_x, &grad_weight})
    ASSERT_NO_FATAL_FAILURE(expect_same(*t, c.describe()));
  ASSERT_TRUE(scratch.guards_untouched()) << c.describe();
  if (parts.in_place || parts.accumulate) return;
  const Bytes x = grad_x.device.read(), w = grad_weight.device.read();
  expect_success(rms_norm_backward(device, nullptr));
  ASSERT_TRUE(grad_x.device.read() == x && grad_weight.device.read() == w) << "a second run differs: " << c.describe();
}

TEST(FusedGpu, RmsNormBackwardMatchesCpuAndRepeatsBitForBit) {
  constexpr BackwardParts kParts[] = {{true, true, true, false, false},
                                      {false, true, true, true, true},
                                      {true, false, true, false, false},
                                      {true, true, false, true, false}};
  int turn = 0;
  for_norm_cases([&](const NormCase& c) {
    const BackwardParts& parts = kParts[turn++ % 4];
    ASSERT_NO_FATAL_FAILURE(expect_norm_backward(c, parts,
                                                 turn % 3 == 0           ? c.dtype
                                                 : c.dtype == DType::F64 ? DType::F64
                                                                         : DType::F32));
    if (c.dim == 2048 && c.shift == 0) {
      ASSERT_NO_FATAL_FAILURE(expect_norm_backward(c, kParts[0], DType::F32));
    }
  });
}

TEST(FusedGpu, RmsNormOfNoRowsHasAZeroWeightGradient) {
  Twin grad_weight(DType::F32, 64, 0, 1);
  RmsNormBackwardArgs a;
  a.grad_weight = grad_weight.device.data(), a.dtype = DType::BF16, a.dim = 64;
  expect_success(rms_norm_backward(a, nullptr));
  EXPECT_EQ(widen(grad_weight.device.read(), DType::F32), std::vector<double>(64, 0));
}

TEST(FusedGpu, RmsNormRefusesRowsThatDoNotFitInRegisters) {
  RmsNormArgs a;
  a.rows = 1, a.dim = kMaxRmsNormWidth + 8;
  EXPECT_NE(rms_norm(a, nullptr), 0);
}

/// Numbers of which every order of additions gives the same sum.
void fill_with_integers(Twin& twin, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(twin.host.size() / size_of(twin.dtype));
  for (float& v : values) v = static_cast<float>(random() % 19) - 9;
  cast_cpu({twin.host.data(), twin.dtype, values.data(), DType::F32, static_cast<int64_t>(values.size())});
  twin.device.write(twin.host);
}

/// A matrix whose columns are summed on both sides.
struct ColumnSums {
  NormCase c;
  Twin x, out;
  DeviceArray scratch;
  ColumnSums(const NormCase& given, DType out_dtype)
      : c(given),
        x(c.dtype, c.rows * c.dim, c.shift, 1),
        out(out_dtype, c.dim, c.shift, 2),
        scratch(DType::F32, static_cast<int64_t>(column_sums_scratch_bytes(c.rows, c.dim, c.dtype) / 4), 0) {}
  void run(bool accumulate) {
    ColumnSumsArgs a{x.host.data(), c.dtype, out.host.data(), out.dtype, accumulate, nullptr, c.rows, c.dim};
    column_sums_cpu(a);
    a.x = x.device.data(), a.out = out.device.data(), a.scratch = scratch.data();
    expect_success(column_sums(a, nullptr));
  }
};

void expect_exact_column_sums(const NormCase& c, DType out_dtype, bool accumulate) {
  ColumnSums sums(c, out_dtype);
  fill_with_integers(sums.x, 1), fill_with_integers(sums.out, 2);
  sums.run(accumulate);
  ASSERT_EQ(first_difference(sums.out.device.read(), sums.out.host, out_dtype), -1) << c.describe();
  ASSERT_TRUE(sums.out.device.guards_untouched() && sums.scratch.guards_untouched()) << c.describe();
  ASSERT_TRUE(sums.x.device.read() == sums.x.host) << c.describe();
}

TEST(FusedGpu, ColumnSumsOfIntegersAreThoseOfTheCpu) {
  int turn = 0;
  for (const DType dtype : kAll)
    for (const int64_t columns : {1, 2, 7, 8, 24, 64, 100, 256, 264, 2048, 2049})
      for (const int64_t rows : {0, 1, 3, 65, 700})
        for (const int64_t shift : {0, 1}) {
          ++turn;
          ASSERT_NO_FATAL_FAILURE(expect_exact_column_sums({dtype, rows, columns, shift}, kAll[turn / 2 % 4], turn % 3 == 0));
        }
  // Strips of several turns, with one or many blocks beside each other.
  for (const DType dtype : {DType::F32, DType::BF16}) {
    ASSERT_NO_FATAL_FAILURE(expect_exact_column_sums({dtype, 100003, 1, 0}, DType::F32, false));
    ASSERT_NO_FATAL_FAILURE(expect_exact_column_sums({dtype, 70, 135200, 0}, DType::F32, true));
    ASSERT_NO_FATAL_FAILURE(expect_exact_column_sums({dtype, 700, 5121, 1}, DType::F32, false));
  }
}

TEST(FusedGpu, ColumnSumsRepeatBitForBit) {
  for (const DType dtype : kAll)
    for (const int64_t columns : {2047, 2048}) {
      ColumnSums sums({dtype, 700, columns, 0}, dtype);
      sums.run(false);
      const Bytes first = sums.out.device.read();
      ASSERT_NO_FATAL_FAILURE(expect_same(sums.out, sums.c.describe()));
      sums.run(false);
      ASSERT_TRUE(sums.out.device.read() == first) << sums.c.describe();
    }
}

void for_flat_cases(const std::function<void(DType, int64_t, int64_t)>& expect) {
  for (const DType dtype : kAll)
    for (const int64_t n : {0, 1, 7, 8, 63, 4097, 1000003})
      for (const int64_t shift : {0, 1, 3}) ASSERT_NO_FATAL_FAILURE(expect(dtype, n, shift));
}

TEST(FusedGpu, SiluMatchesCpu) {
  for_flat_cases([](DType t, int64_t n, int64_t shift) {
    for (const bool gated : {false, true}) {
      Twin h(t, n, shift, 1, 8), up(t, n, shift, 2), out(t, n, shift, 3);
      silu_cpu({out.host.data(), h.host.data(), gated ? up.host.data() : nullptr, t, n});
      expect_success(silu({out.device.data(), h.device.data(), gated ? up.device.data() : nullptr, t, n}, nullptr));
      for (const Twin* x : {&h, &up, &out}) ASSERT_NO_FATAL_FAILURE(expect_same(*x, describe(t, t, n, shift)));
    }
  });
}

TEST(FusedGpu, SiluBackwardMatchesCpuInPlaceToo) {
  for_flat_cases([](DType t, int64_t n, int64_t shift) {
    for (const bool gated : {false, true})
      for (const bool wants_out : {false, true}) {
        Twin grad(t, n, shift, 1), h(t, n, shift, 2, 8), up(t, n, shift, 3), grad_up(t, n, shift, 4),
            out(t, n, shift == 3 ? 0 : shift, 5);
        const auto args = [&](auto data) {
          return SiluBackwardArgs{data(grad),
                                  data(h),
                                  gated ? data(up) : nullptr,
                                  data(grad),
                                  gated ? data(grad_up) : nullptr,
                                  wants_out ? data(out) : nullptr,
                                  t,
                                  n};
        };
        silu_backward_cpu(args([](Twin& x) -> void* { return x.host.data(); }));
        expect_success(silu_backward(args([](Twin& x) { return x.device.data(); }), nullptr));
        for (const Twin* x : {&grad, &h, &up, &grad_up, &out}) ASSERT_NO_FATAL_FAILURE(expect_same(*x, describe(t, t, n, shift)));
      }
  });
}

TEST(FusedGpu, SiluOfEveryBf16AndHalfMatchesCpu) {
  for (const DType t : {DType::F16, DType::BF16}) {
    Bytes all(65536 * 2);
    for (uint32_t k = 0; k < 65536; ++k)
      all[2 * k] = static_cast<unsigned char>(k), all[2 * k + 1] = static_cast<unsigned char>(k >> 8);
    DeviceArray h(t, 65536, 0), out(t, 65536, 0);
    h.write(all);
    Bytes expected(all.size());
    silu_cpu({expected.data(), all.data(), nullptr, t, 65536});
    expect_success(silu({out.data(), h.data(), nullptr, t, 65536}, nullptr));
    const auto x = widen(all, t), got = widen(out.read(), t), want = widen(expected, t);
    for (size_t i = 0; i < x.size(); ++i) {
      const bool equal = got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]));
      ASSERT_TRUE(equal ||
                  std::fabs(got[i] - want[i]) <= std::fabs(want[i]) * unit(t) * 1.01 + (t == DType::F16 ? 0x1p-24 : 2e-36))
          << x[i] << ": " << got[i] << ", expected " << want[i];
    }
  }
}

std::vector<int64_t> targets_for(int64_t rows, int64_t vocab) {
  std::vector<int64_t> targets;
  for (int64_t r = 0; r < rows; ++r) targets.push_back(r % 5 == 3 ? -100 : (r * 7919 + 3) % vocab);
  if (rows > 4) targets[4] = vocab, targets[1] = vocab - 1, targets[2] = 0;
  if (rows > 5) targets[5] = -7;
  return targets;
}

/// Targets on the device.
class Targets {
 public:
  explicit Targets(const std::vector<int64_t>& values) : array_(DType::F64, static_cast<int64_t>(values.size()), 0) {
    Bytes bytes(values.size() * 8);
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    array_.write(bytes);
  }
  const int64_t* data() const { return static_cast<const int64_t*>(array_.data()); }

 private:
  DeviceArray array_;
};

TEST(FusedGpu, CrossEntropyMatchesCpu) {
  for (const DType t : kAll)
    for (const int64_t vocab : {1, 2, 15, 33, 1000, 1037, 32000, 50257, 131072})
      for (const int64_t rows : {1, 7, 300})
        for (const int64_t shift : {0, 3})
          for (const bool gradient : {true, false}) {
            if (rows == 300 && (vocab > 2000 || shift != 0)) continue;
            Twin logits(t, rows * vocab, shift, 1, 4), losses(compute_type(t), rows, 0, 2), factor(DType::F64, 1, 0, 3);
            const auto targets = targets_for(rows, vocab);
            const Targets on_device(targets);
            CrossEntropyArgs host{logits.host.data(), t, targets.data(), losses.host.data(), rows, vocab, -100, gradient};
            if (rows == 7) host.factor = reinterpret_cast<const double*>(factor.host.data());
            CrossEntropyArgs device = host;
            if (rows == 7) device.factor = static_cast<const double*>(factor.device.data());
            device.logits = logits.device.data(), device.targets = on_device.data(), device.losses = losses.device.data();
            cross_entropy_cpu(host);
            expect_success(cross_entropy(device, nullptr));
            const std::string what = describe(t, t, vocab, shift) + " rows " + std::to_string(rows);
            ASSERT_NO_FATAL_FAILURE(expect_same(logits, what));
            ASSERT_NO_FATAL_FAILURE(expect_same(losses, what));
          }
}

TEST(FusedGpu, CrossEntropyOfInfiniteLogitsMatchesCpu) {
  constexpr float kInf = INFINITY, kNan = NAN;
  const float rows[][4] = {{-kInf, 1, 2, 3}, {1, -kInf, -kInf, -kInf}, {-kInf, -kInf, -kInf, -kInf},
                           {kInf, 1, 2, 3},  {1, kNan, 2, 3},          {1e30F, -1e30F, 0, 1}};
  const auto count = static_cast<int64_t>(std::size(rows));
  for (const DType t : {DType::F32, DType::BF16}) {
    Twin logits(t, count * 4, 0, 1), losses(DType::F32, count, 0, 2);
    cast_cpu({logits.host.data(), t, rows, DType::F32, count * 4});
    logits.device.write(logits.host);
    const std::vector<int64_t> targets(static_cast<size_t>(count), 0);
    const Targets on_device(targets);
    cross_entropy_cpu({logits.host.data(), t, targets.data(), losses.host.data(), count, 4, -100, true});
    expect_success(
        cross_entropy({logits.device.data(), t, on_device.data(), losses.device.data(), count, 4, -100, true}, nullptr));
    expect_same(logits, "gradient");
    expect_same(losses, "loss");
  }
}

TEST(FusedGpu, MeanFactorsMatchCpu) {
  for (const int64_t rows : {0, 1, 3, 511, 512, 8192, 10001}) {
    const auto targets = targets_for(rows, 100);
    const Targets on_device(targets);
    Twin factors(DType::F64, 3, 0, 1);
    mean_factors_cpu({targets.data(), rows, -100, reinterpret_cast<double*>(factors.host.data())});
    expect_success(mean_factors({on_device.data(), rows, -100, static_cast<double*>(factors.device.data())}, nullptr));
    EXPECT_EQ(first_difference(factors.device.read(), factors.host, DType::F64), -1) << rows;
  }
}

TEST(FusedGpu, TheComparisonItselfCanFail) {
  const Bytes a = random_values(DType::BF16, 100, 1);
  Bytes b = a;
  EXPECT_TRUE(same(a, b, DType::BF16, 0));
  b[2 * 57] ^= 4;
  EXPECT_FALSE(same(a, b, DType::BF16, 0));
}

}  // namespace
}  // namespace fsdpp::kernels
