#include "base/enforce.h"
#include "ops/cudnn_attention.h"

namespace fsdpp::ops {

bool cudnn_takes(const at::Tensor&, const AttentionOptions&, bool) { return false; }

CudnnAttention cudnn_attention(const at::Tensor&, const AttentionOptions&) {
  fail<UsageError>("attention: this build is without cuDNN");
}

at::Tensor cudnn_attention_gradient(const at::Tensor&, const CudnnAttention&, const at::Tensor&,
                                    const AttentionOptions&) {
  fail<UsageError>("attention: this build is without cuDNN");
}

}  // namespace fsdpp::ops
