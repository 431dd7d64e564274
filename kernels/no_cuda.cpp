#include "kernels/activation.h"
#include "kernels/column_sums.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/kernels.h"
#include "kernels/rms_norm.h"

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
int rms_norm(const RmsNormArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
size_t rms_norm_scratch_bytes(int64_t /*rows*/, int64_t /*dim*/, DType /*dtype*/) { return 0; }
int rms_norm_backward(const RmsNormBackwardArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
size_t column_sums_scratch_bytes(int64_t /*rows*/, int64_t /*columns*/, DType /*dtype*/) { return 0; }
int column_sums(const ColumnSumsArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
size_t embedding_backward_scratch_bytes(int64_t /*tokens*/, int64_t /*vocab*/) { return 0; }
int embedding_backward(const EmbeddingBackwardArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
int silu(const SiluArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
int silu_backward(const SiluBackwardArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
int cross_entropy(const CrossEntropyArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }
int mean_factors(const MeanFactorsArgs& /*args*/, CUstream_st* /*stream*/) { return kNotSupported; }

}  // namespace fsdpp::kernels
