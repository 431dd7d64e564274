#include "kernels/kernels.h"

/// The launchers of a build without CUDA: nothing can call them with a device pointer, and they say so.
namespace fsdpp::kernels {
namespace {
constexpr int kNotSupported = 801;  // cudaErrorNotSupported
}

int cast(const CastArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
int pack(const PackArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
int adamw(const AdamWArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
int sgd(const SGDArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
size_t norm_scratch_bytes() { return 0; }
int norm_accumulate(const NormArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
int scale_by(void* /*data*/, DType /*dtype*/, int64_t /*numel*/, const double* /*coefficient*/,
             CUstream_st* /*stream*/) {
  return kNotSupported;
}

}  // namespace fsdpp::kernels
