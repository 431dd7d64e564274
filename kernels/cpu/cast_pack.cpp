#include "kernels/cpu/blocks.h"

namespace fsdpp::kernels {
namespace {

using namespace cpu;

template <class C>
void cast_as(const CastArgs& a) {
  const auto scale = static_cast<C>(a.scale);
  C value[kBlock];
  C old[kBlock];
  for_blocks(a.numel, [&](int64_t begin, int64_t n) {
    load(a.src, a.src_dtype, begin, n, value);
    if (a.scale != 1.0) {
      for (int64_t i = 0; i < n; ++i) value[i] *= scale;
    }
    if (a.accumulate) {
      load(a.dst, a.dst_dtype, begin, n, old);
      for (int64_t i = 0; i < n; ++i) value[i] += old[i];
    }
    store(a.dst, a.dst_dtype, begin, n, value);
  });
}

}  // namespace

void cast_cpu(const CastArgs& a) {
  if (a.numel <= 0) return;
  if (a.dst_dtype == a.src_dtype && a.scale == 1.0 && !a.accumulate) {
    if (a.dst != a.src) std::memmove(a.dst, a.src, static_cast<size_t>(a.numel) * size_of(a.dst_dtype));
  } else if (a.dst_dtype == DType::F64 || a.src_dtype == DType::F64) {
    cast_as<double>(a);
  } else {
    cast_as<float>(a);
  }
}

void pack_cpu(const PackArgs& a) {
  for (int k = 0; k < a.count; ++k) {
    const PackPiece& piece = a.pieces[k];
    char* dst = at(a.dst, a.dst_dtype, piece.offset);
    if (piece.src != nullptr) {
      cast_cpu({dst, a.dst_dtype, piece.src, a.src_dtype, piece.numel, a.scale, a.accumulate});
    } else if (!a.accumulate && piece.numel > 0) {
      std::memset(dst, 0, static_cast<size_t>(piece.numel) * size_of(a.dst_dtype));
    }
  }
}

void scale_by_cpu(void* data, DType dtype, int64_t numel, const double* coefficient) {
  cast_cpu({data, dtype, data, dtype, numel, *coefficient, false});
}

}  // namespace fsdpp::kernels
