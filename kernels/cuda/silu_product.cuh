#pragma once
#include <cuda_runtime_api.h>

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "kernels/silu_product.h"

/// CUTLASS' warp-specialised product of tiles in turns (ping-pong): two groups of warps, one multiplies while the other
/// computes and stores its result, so that the exponentials cost next to nothing.
namespace fsdpp::kernels {

namespace silu_products {

namespace fusion = cutlass::epilogue::fusion;
namespace collective = cutlass::epilogue::collective;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

// As the kernels of activation.cu, so that results have the same bits.
CUTLASS_HOST_DEVICE float sigmoid(float x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.F, 1.F + __expf(-x));
#else
  return 1.F / (1.F + std::exp(-x));
#endif
}

template <class T>
struct Silu {
  CUTLASS_HOST_DEVICE T operator()(T const& x) const { return x * sigmoid(x); }
};
template <int N>
struct Silu<cutlass::Array<float, N>> {
  using Floats = cutlass::Array<float, N>;
  CUTLASS_HOST_DEVICE Floats operator()(Floats const& x) const {
    Floats y;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) y[i] = Silu<float>{}(x[i]);
    return y;
  }
};

// A gradient of silu(x) into that of x.
template <class T>
struct SiluGradient {
  CUTLASS_HOST_DEVICE T operator()(T const& grad, T const& x) const {
    const T s = sigmoid(x);
    return grad * (s * (T(1) + x * (T(1) - s)));
  }
};
template <int N>
struct SiluGradient<cutlass::Array<float, N>> {
  using Floats = cutlass::Array<float, N>;
  CUTLASS_HOST_DEVICE Floats operator()(Floats const& grad, Floats const& x) const {
    Floats y;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) y[i] = SiluGradient<float>{}(grad[i], x[i]);
    return y;
  }
};

/// m × n = m × k times k × n, result by rows. Forward: the second factor is given as [n, k]. Backward: as [k, n], and h
/// is read too.
template <class Element, bool kBackward>
struct Config {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using MainSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
  using Row = cutlass::layout::RowMajor;
  using LayoutB = std::conditional_t<kBackward, Row, cutlass::layout::ColumnMajor>;
  using Read = std::conditional_t<kBackward, Element, void>;  // what the epilogue reads: h

  using EpilogueTile =
      decltype(collective::detail::sm90_compute_tile_shape_or_override<Element, collective::EpilogueTileAuto,
                                                                       EpilogueSchedule, Tile>());
  static constexpr int kTiles = cute::size(cute::shape_div(cute::take<0, 2>(Tile{}), EpilogueTile{}));
  static constexpr int kStored = cute::min(kTiles, 2),
                       kRead = kBackward ? cute::max(cute::min(kTiles, 4), kStored + 1) : cute::min(kTiles, 4);
  using Policy = cutlass::epilogue::Sm90TmaWarpSpecialized<kRead, kStored, cute::size(EpilogueTile{}) / 128, kBackward,
                                                           !kBackward>;

  // The tree of the epilogue. Its root is stored as result: a in forward, grad_h in backward; AuxStore stores the other
  // one.
  using Stride = cutlass::gemm::TagToStrideC_t<Row>;
  using AuxStore = fusion::Sm90AuxStore<
      kStored, EpilogueTile, Element, kRound, Stride,
      decltype(collective::detail::sm90_get_epilogue_smem_swizzle_layout_atom<Stride, Element, EpilogueTile>()),
      decltype(collective::detail::sm90_get_smem_store_op_for_accumulator<Stride, Element, EpilogueTile>()), 8, false>;
  using Sum = fusion::Sm90AccFetch;
  using Rounded =
      fusion::Sm90EVT<fusion::Sm90Compute<cutlass::epilogue::thread::Identity, Element, float, kRound>, Sum>;
  using Activation = fusion::Sm90Compute<Silu, Element, float, kRound>;
  using Gradient = fusion::Sm90Compute<SiluGradient, Element, float, kRound>;
  using H = fusion::Sm90SrcFetch<Element>;
  using Forward = fusion::Sm90EVT<Activation, fusion::Sm90EVT<AuxStore, Rounded>>;
  using Backward = fusion::Sm90SplitTreeVisitor<Sum, fusion::Sm90EVT<Gradient, Sum, H>,
                                                fusion::Sm90EVT<AuxStore, fusion::Sm90EVT<Activation, H>>>;
  using Tree = std::conditional_t<kBackward, Backward, Forward>;

  using Epilogue = typename collective::detail::Sm90TmaBuilderImpl<Tile, EpilogueTile, float, float, Read, Row, 8,
                                                                   Element, Row, 8, Tree, Policy>::CollectiveOp;
  using Main = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Row, 8, Element, LayoutB, 8, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      MainSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Main, Epilogue,
                                                      cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};

struct Matrices {
  int m, n, k, blocks_per_processor;
  const void *a, *b, *read;
  void *result, *aux;
};

// Rows or columns `ld` elements apart, whichever the type leaves open; one batch.
template <class Stride>
Stride stride_of(int64_t ld) {
  Stride stride{};
  if constexpr (cute::is_static<std::decay_t<decltype(cute::get<0>(stride))>>::value)
    cute::get<1>(stride) = ld;
  else
    cute::get<0>(stride) = ld;
  return stride;
}

template <class C, class Element, bool kBackward>
typename C::Gemm::Arguments arguments_of(const Matrices& p) {
  using Kernel = typename C::Kernel;
  const auto stride_a = stride_of<typename Kernel::StrideA>(p.k);
  const auto stride_b = stride_of<typename Kernel::StrideB>(kBackward ? p.n : p.k);
  const auto stride_read = stride_of<typename Kernel::StrideC>(p.n);
  const auto stride = stride_of<typename Kernel::StrideD>(p.n);
  typename C::Gemm::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {p.m, p.n, p.k, 1},
      {static_cast<const Element*>(p.a), stride_a, static_cast<const Element*>(p.b), stride_b},
      {{}, nullptr, stride_read, static_cast<Element*>(p.result), stride}};
  if constexpr (kBackward) {
    arguments.epilogue.ptr_C = static_cast<const Element*>(p.read);
    arguments.epilogue.thread.op_1.op_1 = {static_cast<Element*>(p.aux), stride};
  } else {
    arguments.epilogue.thread.op_0.op_1 = {static_cast<Element*>(p.aux), stride};
  }
  return arguments;
}

inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 0;
}

template <class Element, bool kBackward>
int run(const Matrices& p, CUstream_st* stream) {
  using C = Config<Element, kBackward>;
  auto arguments = arguments_of<C, Element, kBackward>(p);
  cudaGetDevice(&arguments.hw_info.device_id);
  arguments.hw_info.sm_count = multiprocessors() * p.blocks_per_processor;
  // Tiles side by side in squares of eight: what they read is found in the second-level cache. The fastest of the
  // orders that were tried.
  using Order = std::remove_cv_t<decltype(arguments.scheduler.raster_order)>;
  arguments.scheduler.raster_order = Order::AlongN;
  arguments.scheduler.max_swizzle_size = 8;
  typename C::Gemm gemm;
  if (C::Gemm::can_implement(arguments) != cutlass::Status::kSuccess || C::Gemm::get_workspace_size(arguments) != 0)
    return cudaErrorInvalidValue;
  if (gemm.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess ||
      gemm.run(stream) != cutlass::Status::kSuccess) {
    const auto status = cudaGetLastError();
    return status == cudaSuccess ? cudaErrorLaunchFailure : status;
  }
  return cudaSuccess;
}

}  // namespace silu_products

template <class Element>
int launch(const SiluProductArgs& a, CUstream_st* stream) {
  const auto m = static_cast<int>(a.rows), n = static_cast<int>(a.width), k = static_cast<int>(a.in);
  return silu_products::run<Element, false>({m, n, k, a.blocks_per_processor, a.x, a.weight, nullptr, a.a, a.h},
                                            stream);
}

template <class Element>
int launch(const SiluProductBackwardArgs& a, CUstream_st* stream) {
  const auto m = static_cast<int>(a.rows), n = static_cast<int>(a.width), k = static_cast<int>(a.out);
  return silu_products::run<Element, true>({m, n, k, a.blocks_per_processor, a.grad, a.weight, a.h, a.grad_h, a.a},
                                           stream);
}

}  // namespace fsdpp::kernels
