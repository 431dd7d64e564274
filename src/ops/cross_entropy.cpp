#include "fsdpp/ops/cross_entropy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "kernels/cross_entropy.h"
#include "ops/destination.h"
#include "ops/gradients.h"
#include "ops/kernel_use.h"
#include "ops/product.h"

namespace fsdpp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Equal chunks, no larger than `most`.
int64_t chunk_rows(const at::Tensor& x, int64_t rows, int64_t asked) {
  const auto wide = static_cast<int64_t>(c10::elementSize(compute_type(x))), width = static_cast<int64_t>(x.element_size());
  const int64_t most = asked > 0 ? asked : std::max<int64_t>(1024, x.size(-1) * wide / width);
  const int64_t chunks = std::max<int64_t>(1, (rows + most - 1) / most);
  return (rows + chunks - 1) / chunks;
}

// Gradients of the sum of the losses; undefined where not wanted.
struct HeadGradients {
  at::Tensor x, weight;
};

// Writes the losses of one chunk of rows, and its gradients. `logits`: memory for them.
void run_chunk(const at::Tensor& x, const at::Tensor& weight, kernels::CrossEntropyArgs args, at::Tensor logits,
               const HeadGradients& gradients, int64_t begin) {
  const bool wants_x = gradients.x.defined(), wants_weight = gradients.weight.defined();
  product_into(logits, x, weight.t(), /*accumulate=*/false);
  args.logits = data_of(logits), args.dtype = shard::kernel_dtype(x.scalar_type());
  args.rows = logits.size(0), args.vocab = logits.size(1), args.write_gradient = wants_x || wants_weight;
  run("cross_entropy", x, args, kernels::cross_entropy, kernels::cross_entropy_cpu);
  if (wants_x) product_into(gradients.x.narrow(0, begin, args.rows), logits, weight, /*accumulate=*/false);
  if (wants_weight) product_into(gradients.weight, logits.t(), x, /*accumulate=*/begin > 0);
}

// One loss for each row. `factor`: of the gradients, or null.
at::Tensor run_chunks(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                      const LinearCrossEntropyOptions& options, const HeadGradients& gradients, const double* factor) {
  const auto rows = x.size(0), chunk = chunk_rows(x, rows, options.chunk_rows);
  auto losses = at::empty({rows}, x.options().dtype(compute_type(x)));
  auto logits = at::empty({chunk, weight.size(0)}, x.options());
  if (rows == 0 && gradients.weight.defined()) gradients.weight.zero_();
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const auto count = std::min(chunk, rows - begin);
    kernels::CrossEntropyArgs args{.targets = targets.const_data_ptr<int64_t>() + begin,
                                   .losses = data_of(losses.narrow(0, begin, count))};
    args.ignore_index = options.ignore_index, args.factor = factor;
    run_chunk(x.narrow(0, begin, count), weight, args, logits.narrow(0, 0, count), gradients, begin);
  }
  return losses;
}

// Whether the mean's power of two is in the gradients from the start: fp16 would lose small ones.
bool scales_early(const at::Tensor& x) { return x.scalar_type() != at::kHalf; }

// See kernels::mean_factors.
at::Tensor mean_factors(const at::Tensor& targets, int64_t ignore_index) {
  auto factors = at::empty({3}, targets.options().dtype(at::kDouble));
  const kernels::MeanFactorsArgs args{targets.const_data_ptr<int64_t>(), targets.numel(), ignore_index,
                                      factors.mutable_data_ptr<double>()};
  run("mean_factors", targets, args, kernels::mean_factors, kernels::mean_factors_cpu);
  return factors;
}

void scale(const at::Tensor& t, const at::Tensor& factor) {
  const auto dtype = shard::kernel_dtype(t.scalar_type());
  const auto* by = factor.const_data_ptr<double>();
  shard::run_kernel(
      "scale_by", cuda::current_stream(t.device()),
      [&](auto s) { return kernels::scale_by(data_of(t), dtype, t.numel(), by, s); },
      [&] { kernels::scale_by_cpu(data_of(t), dtype, t.numel(), by); });
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& targets_given, const LinearCrossEntropyOptions& options, bool wants_x,
                            bool wants_weight) {
    auto rows = dense(rows_of(x)), targets = dense(targets_given);
    HeadGradients gradients;
    if (wants_x) gradients.x = at::empty_like(rows);
    if (wants_weight) gradients.weight = memory_for_sums(weight, compute_type(x));
    auto factors = mean_factors(targets, options.ignore_index);
    auto losses = run_chunks(rows, weight, targets, options, gradients,
                             scales_early(x) ? factors.const_data_ptr<double>() + 1 : nullptr);
    const auto left = scales_early(x) ? factors[2] : at::mul(factors[1], factors[2]);
    context->save_for_backward({gradients.x, gradients.weight, left, weight});
    context->saved_data["sizes"] = x.sizes();
    return losses.sum().mul_(factors[0]);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    expect_first_order("linear_cross_entropy", "at::cross_entropy_loss(at::linear(x, weight), targets)");
    FSDPP_ENFORCE(
        context->saved_data.count("spent") == 0, UsageError,
        "fsdpp::ops::linear_cross_entropy: expected one backward through a loss, got a second one. Try: compute the loss anew.");
    context->saved_data["spent"] = true;
    const auto saved = context->get_saved_variables();
    const auto &grad_x = saved[0], &grad_weight = saved[1], &weight = saved[3];
    const auto factor = at::mul(grads[0].to(at::kDouble), saved[2]);
    variable_list result(6);
    if (context->needs_input_grad(0) && grad_x.defined()) {
      scale(grad_x, factor);
      result[0] = grad_x.view(context->saved_data["sizes"].toIntVector());
    }
    if (context->needs_input_grad(1) && grad_weight.defined()) result[1] = write_weight_gradient(weight, grad_weight, factor);
    return result;
  }

  // In the unit's gradient buffer if it can be had, so that backward scales it there.
  static at::Tensor memory_for_sums(const at::Tensor& weight, c10::ScalarType type) {
    auto early = early_gradient(weight);
    return early && early->scalar_type() == type ? *early : at::empty(weight.sizes(), weight.options().dtype(type));
  }

  static at::Tensor write_weight_gradient(const at::Tensor& weight, const at::Tensor& sum, const at::Tensor& factor) {
    Destination to(weight, sum);
    if (to.out.is_same_size(sum) && to.out.const_data_ptr() == sum.const_data_ptr())
      scale(to.out, factor);  // of 1: nothing to do
    else if (to.accumulate)
      to.out.addcmul_(sum, factor.to(sum.scalar_type()));
    else
      at::mul_out(to.out, sum, factor);
    return to.own;
  }
};

void check_targets(const at::Tensor& targets, int64_t vocab, int64_t ignore_index) {
  if (!targets.is_cpu()) return;
  auto given = dense(targets);
  const auto* values = given.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < given.numel(); ++i)
    FSDPP_ENFORCE(values[i] == ignore_index || (values[i] >= 0 && values[i] < vocab), UsageError,
                  "linear_cross_entropy: expected targets in [0, {}) or ignore_index {}, got {} for row {}", vocab, ignore_index,
                  values[i], i);
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options) {
  expect_alike("linear_cross_entropy", {x, weight});
  FSDPP_ENFORCE(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1) && weight.size(1) > 0 && weight.size(0) > 0,
                UsageError, "linear_cross_entropy: expected x as [..., dim] and the weight as [vocab, dim], got [{}] and [{}]",
                fmt::join(x.sizes(), ", "), fmt::join(weight.sizes(), ", "));
  FSDPP_ENFORCE(targets.scalar_type() == at::kLong && targets.device() == x.device() && targets.numel() == x.numel() / x.size(-1),
                UsageError, "linear_cross_entropy: expected {} targets of int64 on {}, got [{}] of {} on {}",
                x.numel() / x.size(-1), x.device().str(), fmt::join(targets.sizes(), ", "), c10::toString(targets.scalar_type()),
                targets.device().str());
  FSDPP_ENFORCE(options.chunk_rows >= 0, UsageError, "linear_cross_entropy: expected chunk_rows of 0 (automatic) or more, got {}",
                options.chunk_rows);
  check_targets(targets, weight.size(0), options.ignore_index);
  const bool records = c10::GradMode::is_enabled();
  return LinearCrossEntropy::apply(x, weight, targets, options, records && x.requires_grad(), records && weight.requires_grad());
}

}  // namespace fsdpp::ops
