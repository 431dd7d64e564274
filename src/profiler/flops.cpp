#include <algorithm>

#include "profiler/op_args.h"

namespace fsdpp::profiler {
namespace {

using Sizes = std::vector<int64_t>;

const Sizes* sizes_at(const std::vector<Arg>& args, size_t i, size_t dims = 0) {
  if (i >= args.size() || args[i].tag != ArgTag::Tensor) return nullptr;
  const Sizes& sizes = args[i].tensors[0].sizes;
  return dims == 0 || sizes.size() == dims ? &sizes : nullptr;
}

double product(const Sizes& sizes, size_t from = 0) {
  double result = 1;
  for (size_t i = from; i < sizes.size(); ++i) result *= static_cast<double>(sizes[i]);
  return result;
}

/// a [.., m, k] by b [.., k, n]
double matmul(const std::vector<Arg>& args, size_t a, size_t b, size_t dims) {
  const Sizes* left = sizes_at(args, a, dims);
  const Sizes* right = sizes_at(args, b, dims);
  if (!left || !right || (*left)[dims - 1] != (*right)[dims - 2]) return 0;
  return 2 * product(*left) * static_cast<double>(right->back());
}

/// A result of [m, n] first, and at `factor` one of [m, k].
double own_product(const std::vector<Arg>& args, size_t factor) {
  const Sizes* out = sizes_at(args, 0, 2);
  const Sizes* left = sizes_at(args, factor, 2);
  return out && left ? 2 * product(*out) * static_cast<double>(left->back()) : 0;
}

/// Attention between all tokens of `at`, [..., seq, dim] in all heads: a product of [seq, dim] and [dim, seq], or as
/// much, `products` times.
double own_attention(const std::vector<Arg>& args, size_t at, double products) {
  const Sizes* out = sizes_at(args, at);
  if (!out || out->size() < 2) return 0;
  return 2 * products * product(*out) * static_cast<double>((*out)[out->size() - 2]);
}

int64_t int_at(const std::vector<Arg>& args, size_t i, size_t k, int64_t fallback) {
  if (i >= args.size() || args[i].ints.empty()) return fallback;
  return args[i].ints[std::min(k, args[i].ints.size() - 1)];  // one value stands for all dimensions
}

/// convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
double convolution(const std::vector<Arg>& args) {
  const Sizes* input = sizes_at(args, 0);
  const Sizes* weight = sizes_at(args, 1);
  if (!input || !weight || input->size() != weight->size() || input->size() < 3) return 0;
  const double per_point = 2 * product(*weight, 1);  // weight [C_out, C_in/groups, k…]; transposed [C_in, C_out/groups, k…]
  if (int_at(args, 6, 0, 0) != 0) return per_point * product(*input);
  double points = static_cast<double>((*input)[0]) * static_cast<double>((*weight)[0]);
  for (size_t i = 2; i < input->size(); ++i) {
    const int64_t reach = int_at(args, 5, i - 2, 1) * ((*weight)[i] - 1) + 1;
    const int64_t room = (*input)[i] + 2 * int_at(args, 4, i - 2, 0) - reach;
    points *= room < 0 ? 0 : static_cast<double>(room / std::max<int64_t>(1, int_at(args, 3, i - 2, 1)) + 1);
  }
  return per_point * points;
}

/// convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask)
double convolution_backward(const std::vector<Arg>& args) {
  const Sizes* grad = sizes_at(args, 0);
  const Sizes* input = sizes_at(args, 1);
  const Sizes* weight = sizes_at(args, 2);
  if (!grad || !input || !weight || weight->size() < 3) return 0;
  const bool transposed = int_at(args, 7, 0, 0) != 0;
  const double forward = 2 * product(*weight, 1) * product(transposed ? *input : *grad);
  double wanted = 2;  // gradients of input and weight
  if (args.size() > 10 && args[10].ints.size() == 3) wanted = static_cast<double>((args[10].ints[0] != 0) + (args[10].ints[1] != 0));
  return wanted * forward;
}

/// Queries [.., heads, L, E], keys [.., S, E], values [.., S, Ev], from argument `q` on.
double attention(const std::vector<Arg>& args, size_t q, double key_products, double value_products) {
  const Sizes* query = sizes_at(args, q);
  const Sizes* key = sizes_at(args, q + 1);
  const Sizes* value = sizes_at(args, q + 2);
  if (!query || !key || !value || query->size() < 2 || key->size() < 2 || value->size() < 2) return 0;
  const double rows = product(*query) / std::max<double>(1, static_cast<double>(query->back()));
  const auto keys = static_cast<double>((*key)[key->size() - 2]);
  return 2 * rows * keys * (key_products * static_cast<double>(query->back()) + value_products * static_cast<double>(value->back()));
}

}  // namespace

double flops_of(std::string_view op, const std::vector<Arg>& args) {
  if (op == "aten::mm") return matmul(args, 0, 1, 2);
  if (op == "aten::addmm") return matmul(args, 1, 2, 2);
  if (op == "aten::bmm") return matmul(args, 0, 1, 3);
  if (op == "aten::baddbmm") return matmul(args, 1, 2, 3);
  if (op == "fsdpp::product") return own_product(args, 1);
  if (op == "fsdpp::silu_product" || op == "fsdpp::silu_product_backward") return own_product(args, 2);
  if (op == "fsdpp::attention") return own_attention(args, 0, 2);
  if (op == "fsdpp::attention_gradient") return own_attention(args, 1, 5);
  if (op == "aten::convolution") return convolution(args);
  if (op == "aten::convolution_backward") return convolution_backward(args);
  if (op.find("scaled_dot_product") == op.npos || op.find("_fused_sdp_choice") != op.npos) return 0;
  // Backward: scores again, and products for the gradients of scores, values, queries and keys.
  return op.ends_with("_backward") ? attention(args, 1, 3, 2) : attention(args, 0, 1, 1);
}

}  // namespace fsdpp::profiler
