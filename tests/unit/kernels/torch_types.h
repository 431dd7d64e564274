#pragma once
#include <ATen/core/Tensor.h>

#include "kernels/kernels.h"

namespace fsdpp::kernels {

inline constexpr DType kAllDTypes[] = {DType::F32, DType::F64, DType::F16, DType::BF16};

inline c10::ScalarType torch_dtype(DType dtype) {
  constexpr c10::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
  return kTypes[static_cast<int>(dtype)];
}
inline const char* name(DType dtype) { return c10::toString(torch_dtype(dtype)); }

inline void* element(const at::Tensor& x, int64_t index) {
  return static_cast<char*>(x.data_ptr()) + index * static_cast<int64_t>(x.element_size());
}

}  // namespace fsdpp::kernels
