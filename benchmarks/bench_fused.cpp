#include <algorithm>
#include <cmath>
#include <memory>

#include "bench_kernels.h"
#include "kernels/activation.h"
#include "kernels/column_sums.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/rms_norm.h"

/// Rows of the kernels that compute sums over rows, or exponentials, in bf16. Their bytes leave out what is small: weights,
/// targets, one number a row.
namespace fsdpp::bench {
namespace {

constexpr int kHalves = 2 * kArrays;  // bf16 arrays of kNumel: two in each of Memory's
constexpr int64_t kDim = 2048;
constexpr int64_t kVocab = 32000;
constexpr int64_t kCheckedRows = 64;

/// The k-th bf16 array.
void* half(void** arrays, int k) { return static_cast<char*>(arrays[k / 2]) + static_cast<size_t>(k % 2) * kNumel * 2; }

/// Device memory for weights, sums and targets, made once.
struct Small {
  static constexpr size_t kBytes = size_t{1} << 20;
  static constexpr int64_t kMostRows = int64_t{1} << 20;
  DeviceBytes memory{kBytes * 4 + std::max(rms_norm_scratch_bytes(kMostRows, kDim, DType::BF16),
                                           column_sums_scratch_bytes(kMostRows, kDim, DType::BF16))};
  Small() {
    std::vector<uint16_t> ones(kDim, 0x3f80);
    std::vector<int64_t> targets(kBytes / 8);
    for (size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<int64_t>(i * 7919 % kVocab);
    std::vector<float> rstd(kBytes / 4, 1.5F);
    check(cudaMemcpy(weight(), ones.data(), ones.size() * 2, cudaMemcpyHostToDevice));
    check(cudaMemcpy(memory.at(kBytes), targets.data(), kBytes, cudaMemcpyHostToDevice));
    check(cudaMemcpy(row_values(), rstd.data(), kBytes, cudaMemcpyHostToDevice));
  }
  void* weight() const { return memory.at(0); }
  const int64_t* targets() const { return reinterpret_cast<const int64_t*>(memory.at(kBytes)); }
  void* row_values() const { return memory.at(2 * kBytes); }
  void* grad_weight() const { return memory.at(3 * kBytes); }
  void* scratch() const { return memory.at(4 * kBytes); }
};
const Small& small() {
  static const Small instance;
  return instance;
}

std::vector<float> widen(const std::vector<uint16_t>& values) {
  std::vector<float> wide(values.size());
  cast_cpu({wide.data(), DType::F32, values.data(), DType::BF16, static_cast<int64_t>(values.size())});
  return wide;
}

bool close(const std::vector<uint16_t>& got, const std::vector<uint16_t>& want) {
  const auto x = widen(got), y = widen(want);
  float largest = 0;
  for (const float v : y) largest = std::max(largest, std::fabs(v));
  for (size_t i = 0; i < x.size(); ++i)
    if (!(std::fabs(x[i] - y[i]) <= std::fabs(y[i]) * 0x1.1p-7F + largest * 3e-6F)) return false;
  return true;
}

/// Runs both over n fresh random numbers in each array, the twin on the host; all arrays must come out alike.
template <class Launch, class Reference>
std::function<bool(const Memory&)> comparison(int64_t n, Launch launch, Reference reference) {
  return [=](const Memory& memory) {
    std::vector<std::vector<uint16_t>> host(kHalves, std::vector<uint16_t>(static_cast<size_t>(n)));
    void* arrays[kArrays];
    void* host_arrays[kHalves];
    for (int k = 0; k < kArrays; ++k) arrays[k] = memory.array(0, k);
    for (int k = 0; k < kHalves; ++k) {
      auto& values = host[static_cast<size_t>(k)];
      std::mt19937 random(static_cast<uint32_t>(k));
      std::normal_distribution<float> normal;
      std::vector<float> wide(values.size());
      for (float& v : wide) v = normal(random);
      cast_cpu({values.data(), DType::BF16, wide.data(), DType::F32, n});
      host_arrays[k] = values.data();
      check(cudaMemcpy(half(arrays, k), values.data(), values.size() * 2, cudaMemcpyHostToDevice));
    }
    check(launch(arrays, n));
    reference(host_arrays, n);
    for (int k = 0; k < kHalves; ++k) {
      std::vector<uint16_t> back(static_cast<size_t>(n));
      check(cudaMemcpy(back.data(), half(arrays, k), back.size() * 2, cudaMemcpyDeviceToHost));
      if (!close(back, host[static_cast<size_t>(k)])) return false;
    }
    return true;
  };
}

/// `args(array, n)`, array(k) being the k-th bf16 array, is called for both sides; `on_device` then sets what is in Small.
template <class Args, class MakeArgs, class OnDevice, class OnHost>
Row row(const std::string& name, const std::string& formula, double bytes, int64_t numel, int64_t checked,
        int (*launch)(const Args&, CUstream_st*), void (*twin)(const Args&), MakeArgs args, OnDevice on_device, OnHost on_host) {
  const auto run = [=](void** arrays, int64_t n) {
    Args a = args([&](int k) { return half(arrays, k); }, n);
    on_device(a);
    return launch(a, nullptr);
  };
  const auto reference = [=](void** arrays, int64_t n) {
    Args a = args([&](int k) { return arrays[k]; }, n);
    on_host(a);
    twin(a);
  };
  return {name, formula, bytes, run, {}, numel, comparison(checked, run, reference)};
}

// What the host side uses in place of Small.
std::vector<uint16_t> host_weight(kDim, 0x3f80);
std::vector<float> host_rows(Small::kBytes / 4, 1.5F);
std::vector<float> host_grad_weight(kDim);

Row norm_row(bool add, int64_t rows) {
  const std::string name = std::string(add ? "add_rms_norm" : "rms_norm") + " bf16, " + std::to_string(rows) + " x 2048";
  const auto args = [=](auto array, int64_t n) {
    RmsNormArgs a;
    a.x = array(0), a.residual = add ? array(1) : nullptr, a.sum = add ? array(2) : nullptr, a.normed = array(3);
    a.dtype = DType::BF16, a.rows = n / kDim, a.dim = kDim, a.eps = 1e-6;
    return a;
  };
  return row<RmsNormArgs>(
      name, add ? "n·4·2" : "n·2·2", add ? 8 : 4, rows * kDim, kCheckedRows * kDim, rms_norm, rms_norm_cpu, args,
      [](RmsNormArgs& a) { a.weight = small().weight(), a.rstd = small().row_values(); },
      [](RmsNormArgs& a) { a.weight = host_weight.data(), a.rstd = host_rows.data(); });
}

Row norm_backward_row(bool add, int64_t rows) {
  const std::string name = std::string(add ? "add_rms_norm" : "rms_norm") + " backward bf16, " + std::to_string(rows) + " x 2048";
  const auto args = [=](auto array, int64_t n) {
    RmsNormBackwardArgs a;
    a.grad_normed = array(0), a.grad_sum = add ? array(1) : nullptr, a.sum = array(2), a.grad_x = array(3);
    a.dtype = DType::BF16, a.rows = n / kDim, a.dim = kDim;
    return a;
  };
  return row<RmsNormBackwardArgs>(
      name, add ? "n·4·2" : "n·3·2", add ? 8 : 6, rows * kDim, kCheckedRows * kDim, rms_norm_backward, rms_norm_backward_cpu,
      args,
      [](RmsNormBackwardArgs& a) {
        a.weight = small().weight(), a.rstd = small().row_values(), a.grad_weight = small().grad_weight(),
        a.scratch = small().scratch();
      },
      [](RmsNormBackwardArgs& a) {
        a.weight = host_weight.data(), a.rstd = host_rows.data(), a.grad_weight = host_grad_weight.data();
      });
}

Row column_sums_row(int64_t rows) {
  const auto args = [=](auto array, int64_t n) {
    ColumnSumsArgs a;
    a.x = array(0), a.dtype = DType::BF16, a.out = array(1), a.out_dtype = DType::BF16, a.rows = n / kDim, a.columns = kDim;
    return a;
  };
  return row<ColumnSumsArgs>(
      "column sums bf16, " + std::to_string(rows) + " x 2048", "n·2", 2, rows * kDim, kCheckedRows * kDim, column_sums,
      column_sums_cpu, args, [](ColumnSumsArgs& a) { a.scratch = small().scratch(); }, [](ColumnSumsArgs&) {});
}

Row silu_row(bool gated) {
  const auto args = [=](auto array, int64_t n) {
    return SiluArgs{array(0), array(1), gated ? array(2) : nullptr, DType::BF16, n};
  };
  const auto nothing = [](SiluArgs&) {};
  return row<SiluArgs>(gated ? "gated silu bf16" : "silu bf16", gated ? "n·3·2" : "n·2·2", gated ? 6 : 4, kNumel, kChecked, silu,
                       silu_cpu, args, nothing, nothing);
}

Row silu_backward_row(bool gated) {
  const auto args = [=](auto array, int64_t n) {
    return SiluBackwardArgs{array(0),    array(1), gated ? array(2) : nullptr, array(0), gated ? array(3) : nullptr, array(4),
                            DType::BF16, n};
  };
  const auto nothing = [](SiluBackwardArgs&) {};
  return row<SiluBackwardArgs>(gated ? "gated silu backward, recomputing, bf16" : "silu backward, recomputing, bf16",
                               gated ? "n·6·2" : "n·4·2", gated ? 12 : 8, kNumel, kChecked, silu_backward, silu_backward_cpu,
                               args, nothing, nothing);
}

Row cross_entropy_row(bool gradient) {
  const auto args = [=](auto array, int64_t n) {
    CrossEntropyArgs a;
    a.logits = array(0), a.dtype = DType::BF16, a.rows = n / kVocab, a.vocab = kVocab, a.write_gradient = gradient;
    return a;
  };
  static std::vector<int64_t> targets;
  for (int64_t i = 0; i < kCheckedRows; ++i) targets.push_back(i * 7919 % kVocab);
  return row<CrossEntropyArgs>(
      gradient ? "cross entropy with gradient bf16, 2048 x 32000" : "cross entropy bf16, 2048 x 32000",
      gradient ? "n·2·2" : "n·2", gradient ? 4 : 2, 2048 * kVocab, kCheckedRows * kVocab, cross_entropy, cross_entropy_cpu, args,
      [](CrossEntropyArgs& a) { a.targets = small().targets(), a.losses = small().row_values(); },
      [](CrossEntropyArgs& a) { a.targets = targets.data(), a.losses = host_rows.data(); });
}

/// Ids of kTokens tokens, and the scratch memory of the gradient of the table.
struct TokenIds {
  static constexpr int64_t kTokens = 8192;
  std::vector<int64_t> ids = std::vector<int64_t>(kTokens);
  DeviceBytes device{kTokens * sizeof(int64_t)}, scratch{embedding_backward_scratch_bytes(kTokens, kVocab)};
  /// draw(u): an id from a number in [0, 1).
  explicit TokenIds(const std::function<double(double)>& draw) {
    std::mt19937 random(3);
    std::uniform_real_distribution<double> uniform;
    for (auto& id : ids) id = std::min(static_cast<int64_t>(draw(uniform(random))), kVocab - 1);
    check(cudaMemcpy(device.at(0), ids.data(), kTokens * sizeof(int64_t), cudaMemcpyHostToDevice));
  }
};

/// n elements of the table. Memory: the gradient of the tokens in the first array, that of the table in the second.
Row embedding_row(const std::string& name, const std::function<double(double)>& draw) {
  auto tokens = std::make_shared<TokenIds>(draw);
  const auto args = [](void* grad, void* out, const int64_t* ids, int64_t n) {
    EmbeddingBackwardArgs a{.grad = grad, .dtype = DType::BF16, .ids = ids, .out = out};
    a.tokens = TokenIds::kTokens, a.vocab = n / kDim, a.dim = kDim;
    return a;
  };
  const auto run = [=](void** arrays, int64_t n) {
    auto a = args(arrays[0], arrays[1], reinterpret_cast<const int64_t*>(tokens->device.at(0)), n);
    a.scratch = tokens->scratch.at(0);
    return embedding_backward(a, nullptr);
  };
  const auto same = [=](const Memory& memory) {
    void* arrays[] = {memory.array(0, 0), memory.array(0, 1)};
    const auto values = static_cast<size_t>(TokenIds::kTokens * kDim);
    std::vector<uint16_t> grad(values);
    std::vector<float> drawn(values), want(kVocab * kDim), got(want.size());
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (float& v : drawn) v = normal(random);
    cast_cpu({grad.data(), DType::BF16, drawn.data(), DType::F32, static_cast<int64_t>(values)});
    check(cudaMemcpy(arrays[0], grad.data(), values * 2, cudaMemcpyHostToDevice));
    check(run(arrays, kVocab * kDim));
    check(cudaMemcpy(got.data(), arrays[1], got.size() * 4, cudaMemcpyDeviceToHost));
    embedding_backward_cpu(args(grad.data(), want.data(), tokens->ids.data(), kVocab * kDim));
    return got == want;
  };
  const double read = static_cast<double>(TokenIds::kTokens * (kDim * 2 + 8)) / static_cast<double>(kVocab * kDim);
  return {"embedding backward bf16 to fp32, 8192 tokens, " + name, "vocab·dim·4 + tokens·(dim·2 + 8)", 4 + read, run, {},
          kVocab * kDim, same};
}

std::vector<Row> embedding_rows() {
  const auto vocab = static_cast<double>(kVocab);
  return {embedding_row("even", [=](double u) { return u * vocab; }),
          embedding_row("zipf", [=](double u) { return std::pow(vocab + 1, u) - 1; }),
          embedding_row("all one", [](double) { return 7; })};
}

}  // namespace

std::vector<Row> fused_rows() {
  std::vector<Row> rows;
  for (const int64_t count : {int64_t{8192}, kNumel / kDim})
    for (const bool add : {false, true}) rows.push_back(norm_row(add, count)), rows.push_back(norm_backward_row(add, count));
  for (const int64_t count : {int64_t{8192}, kNumel / kDim}) rows.push_back(column_sums_row(count));
  for (const bool gated : {false, true}) rows.push_back(silu_row(gated)), rows.push_back(silu_backward_row(gated));
  for (const bool gradient : {false, true}) rows.push_back(cross_entropy_row(gradient));
  for (auto& r : embedding_rows()) rows.push_back(r);
  return rows;
}

}  // namespace fsdpp::bench
