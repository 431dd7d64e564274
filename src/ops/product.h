#pragma once
#include <ATen/core/Tensor.h>

/// Matrix products of the operators: by cuBLASLt where it is at its best (cublas_product.h), else by LibTorch.
namespace fsdpp::ops {

/// out = a·b, or out += a·b; out may be wider than a and b (fp32 for 16-bit products: summed and stored in fp32). Two
/// dimensions.
/// Parameters among the factors: gathered, which the caller sees to (expect_memory).
void product_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate);
[[nodiscard]] at::Tensor product(const at::Tensor& a, const at::Tensor& b);

/// at::linear without a derivative. x: [..., in]; weight: [out, in]; bias: [out] or undefined. UsageError for another bias.
[[nodiscard]] at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace fsdpp::ops
