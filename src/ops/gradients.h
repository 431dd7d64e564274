#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

/// What the backward functions of this layer share.
namespace fsdpp::ops {

/// An argument of an autograd function that may be undefined.
[[nodiscard]] inline std::optional<at::Tensor> optional(const at::Tensor& t) {
  return t.defined() ? std::make_optional(t) : std::nullopt;
}

/// All leading dimensions as one. A copy only where strides do not allow a view.
[[nodiscard]] at::Tensor rows_of(const at::Tensor& t);

/// out = the sums of the columns, or out += them; in out's dtype.
void column_sums_into(const at::Tensor& out, const at::Tensor& rows, bool accumulate);

/// The gradients of a linear's weight and bias from those of its result, written straight into their gradient_target. Undefined
/// if there is one, else the gradient for autograd.
[[nodiscard]] at::Tensor linear_weight_gradient(const at::Tensor& weight, const at::Tensor& grad_rows,
                                                const at::Tensor& input_rows);
[[nodiscard]] at::Tensor linear_bias_gradient(const at::Tensor& bias, const at::Tensor& grad_rows);

// -- linears whose result is cut into parts along the last dimension, each a product with its part of the weight's rows -----------

/// Throws UsageError unless `parts` divides the weight's rows.
void expect_parts(const char* op, const at::Tensor& weight, int64_t parts);
[[nodiscard]] std::vector<at::Tensor> split_products(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, int64_t parts);

/// Gradients of the parts, as rows; some may be undefined.
[[nodiscard]] std::vector<at::Tensor> rows_of_each(const std::vector<at::Tensor>& grads);
[[nodiscard]] bool any_defined(const std::vector<at::Tensor>& tensors);
/// Of the input, shaped as `sizes`. REQUIRES: any_defined(grads).
[[nodiscard]] at::Tensor split_input_gradient(at::IntArrayRef sizes, const at::Tensor& weight, const std::vector<at::Tensor>& grads);
/// As linear_weight_gradient and linear_bias_gradient.
[[nodiscard]] at::Tensor split_weight_gradient(const at::Tensor& weight, const std::vector<at::Tensor>& grads, const at::Tensor& input_rows);
[[nodiscard]] at::Tensor split_bias_gradient(const at::Tensor& bias, const std::vector<at::Tensor>& grads);

/// Throws UsageError in a backward with create_graph. `alternative`: what is differentiable more than once.
void expect_first_order(const char* op, const char* alternative);

}  // namespace fsdpp::ops
