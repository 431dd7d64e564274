#include <cmath>
#include <cub/block/block_reduce.cuh>

#include "kernels/cuda/vector.cuh"

namespace fsdpp::kernels {
namespace {

// The grid never depends on the device or on alignment, so neither does the order of the additions.
constexpr unsigned kBlocks = 1024;

enum class Kind { Sum, SumOfSquares, SumOfPowers, Largest };

struct Add {
  __device__ double operator()(double a, double b) const { return a + b; }
};
/// The larger one; NaN if either is.
struct NanMax {
  __device__ double operator()(double a, double b) const { return b > a || b != b ? b : a; }
};

template <Kind K>
struct Combine : Add {};
template <>
struct Combine<Kind::Largest> : NanMax {};

template <Kind K>
__device__ double term(double x, double p) {
  if constexpr (K == Kind::SumOfSquares) return x * x;
  if constexpr (K == Kind::SumOfPowers) return pow(fabs(x), p);
  return fabs(x);
}

template <Kind K, class T>
__global__ void __launch_bounds__(kThreads)
    partial_kernel(const T* src, int64_t numel, double p, bool aligned, double* partials) {
  constexpr int kVec = vec_length<T>();
  const Combine<K> combine;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t vectors = numel / kVec;
  double sums[kVec] = {};
  staged_loop(
      first, static_cast<int64_t>(kBlocks) * kThreads, vectors,
      [&](int64_t k) {
        if (aligned) return load_vec<kVec>(src + k * kVec);
        Vec<T, kVec> x;
#pragma unroll
        for (int j = 0; j < kVec; ++j) x.v[j] = src[k * kVec + j];
        return x;
      },
      [&](int64_t, const Vec<T, kVec>& x) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[j] = combine(sums[j], term<K>(to_compute<double>(x.v[j]), p));
      });
  double sum = 0;
#pragma unroll
  for (int j = 0; j < kVec; ++j) sum = combine(sum, sums[j]);
  const int64_t rest = vectors * kVec + first;  // the last few elements, one for each of the first threads
  if (rest < numel) sum = combine(sum, term<K>(to_compute<double>(src[rest]), p));
  using Reduce = cub::BlockReduce<double, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  const double total = Reduce(storage).Reduce(sum, combine);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

template <Kind K>
__global__ void __launch_bounds__(kThreads) final_kernel(const double* partials, double* result) {
  const Combine<K> combine;
  double sum = 0;
  for (unsigned k = threadIdx.x; k < kBlocks; k += kThreads) sum = combine(sum, partials[k]);
  using Reduce = cub::BlockReduce<double, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  const double total = Reduce(storage).Reduce(sum, combine);
  if (threadIdx.x == 0) *result = combine(*result, total);
}

template <Kind K>
int launch(const NormArgs& a, cudaStream_t stream) {
  auto* partials = static_cast<double*>(a.scratch);
  const int error = with_type(a.src_dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto* src = static_cast<const T*>(a.src);
    partial_kernel<K>
        <<<kBlocks, kThreads, 0, stream>>>(src, a.numel, a.p, is_vec_aligned<vec_length<T>()>(src), partials);
    return static_cast<int>(cudaGetLastError());
  });
  if (error != 0) return error;
  final_kernel<K><<<1, kThreads, 0, stream>>>(partials, a.result);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

size_t norm_scratch_bytes() { return kBlocks * sizeof(double); }

int norm_accumulate(const NormArgs& a, CUstream_st* stream) {
  if (a.numel <= 0) return 0;
  if (std::isinf(a.p)) return launch<Kind::Largest>(a, stream);
  if (a.p == 2.0) return launch<Kind::SumOfSquares>(a, stream);
  if (a.p == 1.0) return launch<Kind::Sum>(a, stream);
  return launch<Kind::SumOfPowers>(a, stream);
}

}  // namespace fsdpp::kernels
