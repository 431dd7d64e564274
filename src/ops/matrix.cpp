#include "ops/matrix.h"

namespace fsdpp::ops {
namespace {

bool lies_along(const at::Tensor& t, int64_t dim) {
  const auto inner = t.size(dim), apart = t.stride(1 - dim);
  return (t.stride(dim) == 1 || inner == 1) && apart >= inner && apart * t.element_size() % 16 == 0;
}

}  // namespace

bool rows_contiguous(const at::Tensor& matrix) { return lies_along(matrix, 1); }
bool columns_contiguous(const at::Tensor& matrix) { return lies_along(matrix, 0); }
bool is_aligned(const at::Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }
bool is_like(const at::Tensor& t, const at::Tensor& other) {
  return t.device() == other.device() && t.scalar_type() == other.scalar_type() && t.numel() > 0;
}
bool is_half_on_cuda(const at::Tensor& t) {
  return t.is_cuda() && (t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf);
}

}  // namespace fsdpp::ops
