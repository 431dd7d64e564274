#include "bench_kernels.h"

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

/// Bandwidth of the flat-buffer kernels on one GPU. One JSON object a row:
///   bytes     what the kernel must read and write at least, by `formula`
///   ms        median over repeats; each repeat works on other memory than the one before (slots together exceed twice
///   the L2) gb_per_s  bytes / ms of_copy   gb_per_s over that of a device-to-device copy measured in the same run (row
///   "copy": 2·n bytes) correct   the result on fresh random data equals the CPU twin's (bit for bit; norms to 1e-12; fused kernels
///   to a step of bf16)
/// Exit code 1 if any row is not correct, 2 without a GPU.
namespace {

using namespace fsdpp::bench;
using Json = nlohmann::json;

constexpr int kWarmUps = 5;
constexpr int kRepeats = 40;

double median_ms(const Memory& memory, const Row& row) {
  cudaEvent_t start{};
  cudaEvent_t stop{};
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int repeat = -kWarmUps; repeat < kRepeats; ++repeat) {
    void* arrays[kArrays];
    for (int k = 0; k < kArrays; ++k) arrays[k] = memory.array((repeat + kWarmUps) % kSlots, k);
    check(cudaEventRecord(start));
    check(row.launch(arrays, row.numel));
    check(cudaEventRecord(stop));
    check(cudaEventSynchronize(stop));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop));
    if (repeat >= 0) times.push_back(ms);
  }
  check(cudaEventDestroy(start));
  check(cudaEventDestroy(stop));
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return times[kRepeats / 2];
}

/// The kernel on kChecked elements of random numbers against its twin: every array must come out with the same bytes.
bool is_correct(const Memory& memory, const Row& row) {
  if (row.check) return row.check(memory);
  if (!row.reference) return true;
  std::vector<std::vector<float>> host(kArrays, Memory::random_numbers(kChecked));
  void* host_arrays[kArrays];
  void* device_arrays[kArrays];
  for (int k = 0; k < kArrays; ++k) {
    std::rotate(host[static_cast<size_t>(k)].begin(), host[static_cast<size_t>(k)].begin() + 17 * k,
                host[static_cast<size_t>(k)].end());
    host_arrays[k] = host[static_cast<size_t>(k)].data();
    device_arrays[k] = memory.array(0, k);
    check(cudaMemcpy(device_arrays[k], host_arrays[k], kChecked * 4, cudaMemcpyHostToDevice));
  }
  check(row.launch(device_arrays, kChecked));
  row.reference(host_arrays, kChecked);
  for (int k = 0; k < kArrays; ++k) {
    std::vector<float> back(kChecked);
    check(cudaMemcpy(back.data(), device_arrays[k], kChecked * 4, cudaMemcpyDeviceToHost));
    if (std::memcmp(back.data(), host_arrays[k], kChecked * 4) != 0) return false;
  }
  return true;
}

bool norm_is_correct(const Memory& memory, DType dtype) {
  const std::vector<float> numbers = Memory::random_numbers(kChecked);
  check(cudaMemcpy(memory.array(0, 0), numbers.data(), kChecked * 4, cudaMemcpyHostToDevice));
  check(cudaMemset(memory.result(), 0, sizeof(double)));
  check(norm_accumulate(
      {memory.array(0, 0), dtype, kChecked, 2.0, static_cast<double*>(memory.result()), memory.scratch()}, nullptr));
  double ours = 0;
  double expected = 0;
  check(cudaMemcpy(&ours, memory.result(), sizeof(double), cudaMemcpyDeviceToHost));
  norm_accumulate_cpu({numbers.data(), dtype, kChecked, 2.0, &expected, nullptr});
  return std::abs(ours - expected) <= 1e-12 * expected;
}

Row cast_row(const std::string& name, DType to, DType from, bool accumulate) {
  const double width = static_cast<double>(size_of(from) + size_of(to) * (accumulate ? 2 : 1));
  const auto args = [=](void** a, int64_t n) { return CastArgs{a[0], to, a[1], from, n, 0.5, accumulate}; };
  return {name, accumulate ? "n·(src + 2·dst)" : "n·(src + dst)", width,
          [=](void** a, int64_t n) { return cast(args(a, n), nullptr); },
          [=](void** a, int64_t n) { cast_cpu(args(a, n)); }};
}

/// `count` pieces of falling lengths, as a unit's gradients are.
Row pack_row(const std::string& name, int count) {
  const auto pieces = [=](void** a, int64_t n) {
    std::vector<PackPiece> list;
    int64_t begin = 0;
    for (int k = 0; k < count; ++k) {
      const int64_t length = k + 1 == count ? n - begin : (n - begin) / 3 / 8 * 8;
      list.push_back({static_cast<char*>(a[1]) + begin * 4, begin, length});
      begin += length;
    }
    return list;
  };
  const auto args = [](void** a, const std::vector<PackPiece>& list) {
    return PackArgs{a[0], DType::BF16, DType::F32, list.data(), static_cast<int>(list.size()), 1.0, false};
  };
  return {name, "n·(src + dst)", 6, [=](void** a, int64_t n) { return pack(args(a, pieces(a, n)), nullptr); },
          [=](void** a, int64_t n) { pack_cpu(args(a, pieces(a, n))); }};
}

Row adamw_row(const std::string& name, DType grad) {
  const auto args = [=](void** a, int64_t n) {
    AdamWArgs args;
    args.param = a[0];
    args.grad = a[1];
    args.grad_dtype = grad;
    args.exp_avg = a[2];
    args.exp_avg_sq = a[3];
    args.numel = n;
    args.step = 10;
    return args;
  };
  return {name, "n·(6·4 + grad)", 6 * 4 + static_cast<double>(size_of(grad)),
          [=](void** a, int64_t n) { return adamw(args(a, n), nullptr); },
          [=](void** a, int64_t n) { adamw_cpu(args(a, n)); }};
}

Row sgd_row() {
  const auto args = [](void** a, int64_t n) {
    SGDArgs args;
    args.param = a[0];
    args.grad = a[1];
    args.momentum_buffer = a[2];
    args.momentum = 0.9;
    args.numel = n;
    return args;
  };
  return {"sgd f32, momentum", "n·(4·4 + grad)", 5 * 4, [=](void** a, int64_t n) { return sgd(args(a, n), nullptr); },
          [=](void** a, int64_t n) { sgd_cpu(args(a, n)); }};
}

Row norm_row(const Memory& memory, const std::string& name, DType dtype) {
  return {
      name,
      "n·src",
      static_cast<double>(size_of(dtype)),
      [&memory, dtype](void** a, int64_t n) {
        return norm_accumulate({a[0], dtype, n, 2.0, static_cast<double*>(memory.result()), memory.scratch()}, nullptr);
      },
      {}};
}

Row scale_row(const Memory& memory) {
  static const double half = 0.5;
  check(cudaMemcpy(static_cast<char*>(memory.result()) + 8, &half, sizeof(double), cudaMemcpyHostToDevice));
  const auto* device = reinterpret_cast<const double*>(static_cast<char*>(memory.result()) + 8);
  return {"scale_by f32", "2·n·4", 8,
          [=](void** a, int64_t n) { return scale_by(a[0], DType::F32, n, device, nullptr); },
          [](void** a, int64_t n) { scale_by_cpu(a[0], DType::F32, n, &half); }};
}

Json machine() {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0));
  int driver = 0;
  int runtime = 0;
  check(cudaDriverGetVersion(&driver));
  check(cudaRuntimeGetVersion(&runtime));
  return {{"gpu", properties.name},
          {"l2_bytes", properties.l2CacheSize},
          {"cuda_driver", driver},
          {"cuda_runtime", runtime},
          {"compiler", __VERSION__}};
}

bool run() {
  const Json where = machine();
  const Memory memory;
  std::vector<Row> rows{
      {"copy",
       "2·n·4",
       8,
       [](void** a, int64_t n) {
         return static_cast<int>(
             cudaMemcpyAsync(a[0], a[1], static_cast<size_t>(n) * 4, cudaMemcpyDeviceToDevice, nullptr));
       },
       {}},
      cast_row("cast f32 to bf16", DType::BF16, DType::F32, false),
      cast_row("cast bf16 to f32", DType::F32, DType::BF16, false),
      cast_row("cast bf16 to f32, accumulate", DType::F32, DType::BF16, true),
      cast_row("cast f32 to f32, scaled", DType::F32, DType::F32, false),
      pack_row("pack 12 pieces f32 to bf16", 12),
      pack_row("pack 200 pieces f32 to bf16", 200),
      adamw_row("adamw f32", DType::F32),
      adamw_row("adamw f32, bf16 gradient", DType::BF16),
      sgd_row(),
      norm_row(memory, "norm p=2 f32", DType::F32),
      norm_row(memory, "norm p=2 bf16", DType::BF16),
      scale_row(memory),
  };
  for (Row& row : fused_rows()) rows.push_back(std::move(row));
  double copy_rate = 0;
  bool all_correct = true;
  for (const Row& row : rows) {
    const double bytes = row.bytes_per_element * static_cast<double>(row.numel);
    const double ms = median_ms(memory, row);
    const double rate = bytes / ms / 1e6;
    if (row.name == "copy") copy_rate = rate;
    bool correct = is_correct(memory, row);
    if (row.name.starts_with("norm"))
      correct = norm_is_correct(memory, row.bytes_per_element == 4 ? DType::F32 : DType::BF16);
    all_correct = all_correct && correct;
    std::cout << Json{{"bench", "kernels"}, {"name", row.name}, {"n", row.numel},   {"formula", row.formula},
                      {"bytes", bytes},     {"ms", ms},         {"gb_per_s", rate}, {"of_copy", rate / copy_rate},
                      {"correct", correct}, {"machine", where}}
              << std::endl;
  }
  return all_correct;
}

}  // namespace

int main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::cerr << "bench_kernels: expected a CUDA GPU, found none. Try: nvidia-smi -L\n";
    return 2;
  }
  try {
    return run() ? 0 : 1;
  } catch (const std::exception& e) {
    std::cerr << "bench_kernels: " << e.what() << '\n';
    return 1;
  }
}
