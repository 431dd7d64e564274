#pragma once
#include <ATen/core/Tensor.h>

/// What products on CUDA ask of their matrices.
namespace fsdpp::ops {

/// Neighbours along one dimension, 16 bytes apart along the other, or a multiple of them.
[[nodiscard]] bool rows_contiguous(const at::Tensor& matrix);
[[nodiscard]] bool columns_contiguous(const at::Tensor& matrix);
/// Starts at a multiple of 16 bytes.
[[nodiscard]] bool is_aligned(const at::Tensor& t);
/// Not empty, on the device and of the dtype of the other.
[[nodiscard]] bool is_like(const at::Tensor& t, const at::Tensor& other);
/// bf16 or fp16 on a CUDA device.
[[nodiscard]] bool is_half_on_cuda(const at::Tensor& t);

}  // namespace fsdpp::ops
