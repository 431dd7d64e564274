#include "fsdpp/ops/embedding.h"

#include <ATen/ops/embedding.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/enforce.h"
#include "kernels/embedding.h"
#include "ops/destination.h"
#include "ops/gradients.h"
#include "ops/kernel_use.h"

namespace fsdpp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// grad: [tokens, dim], dense.
void write_gradient(const Destination& to, const at::Tensor& grad, const at::Tensor& ids, int64_t padding_idx) {
  kernels::EmbeddingBackwardArgs args{.grad = data_of(grad), .dtype = shard::kernel_dtype(grad.scalar_type())};
  args.ids = ids.const_data_ptr<int64_t>(), args.padding_idx = padding_idx;
  args.out = data_of(to.out), args.out_dtype = shard::kernel_dtype(to.out.scalar_type()),
  args.accumulate = to.accumulate;
  args.tokens = grad.size(0), args.vocab = to.out.size(0), args.dim = grad.size(1);
  at::Tensor scratch;
  if (grad.is_cuda()) {
    const auto bytes = static_cast<int64_t>(kernels::embedding_backward_scratch_bytes(args.tokens, args.vocab));
    scratch = at::empty({bytes}, grad.options().dtype(at::kByte));
    args.scratch = data_of(scratch);
  }
  run("embedding_backward", grad, args, kernels::embedding_backward, kernels::embedding_backward_cpu);
}

struct Embedding : torch::autograd::Function<Embedding> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& ids, const at::Tensor& weight,
                            int64_t padding_idx) {
    context->save_for_backward({ids});
    context->saved_data["weight"] = weight;  // for its place alone: it may have been updated, or resharded, by then
    context->set_materialize_grads(false);
    context->saved_data["vocab"] = weight.size(0);
    context->saved_data["padding_idx"] = padding_idx;
    return at::embedding(weight, ids, padding_idx);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    expect_first_order("embedding", "at::embedding");
    if (!grads[0].defined()) return variable_list(3);
    const auto ids = context->get_saved_variables()[0], weight = context->saved_data["weight"].toTensor();
    const int64_t dim = grads[0].size(-1), vocab = context->saved_data["vocab"].toInt();
    const auto grad = dense(grads[0].reshape({ids.numel(), dim}));
    const Destination to(weight, {vocab, dim}, grad.options());
    write_gradient(to, grad, ids, context->saved_data["padding_idx"].toInt());
    return {at::Tensor(), to.own, at::Tensor()};
  }
};

void check_ids(const at::Tensor& ids, int64_t vocab) {
  if (!ids.is_cpu()) return;
  const auto* values = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i)
    FSDPP_ENFORCE(
        values[i] >= 0 && values[i] < vocab, UsageError,
        "embedding: expected ids in [0, {}), the rows of the weight, got {} for token {}. Try: a weight with more rows",
        vocab, values[i], i);
}

}  // namespace

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, const EmbeddingOptions& options) {
  expect_memory(weight, "fsdpp::ops::embedding");
  expect_alike("embedding", {weight});
  FSDPP_ENFORCE(weight.dim() == 2, UsageError, "embedding: expected the weight as [vocab, dim], got [{}]",
                fmt::join(weight.sizes(), ", "));
  FSDPP_ENFORCE((ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt) && ids.device() == weight.device(),
                UsageError, "embedding: expected ids of int64 or int32 on {}, got {} on {}. Try: ids.to()",
                weight.device().str(), c10::toString(ids.scalar_type()), ids.device().str());
  FSDPP_ENFORCE(options.padding_idx >= -1 && options.padding_idx < weight.size(0), UsageError,
                "embedding: expected padding_idx of -1 (none) or in [0, {}), got {}", weight.size(0),
                options.padding_idx);
  const auto wide = dense(ids.to(at::kLong));
  check_ids(wide, weight.size(0));
  return Embedding::apply(wide, weight, options.padding_idx);
}

}  // namespace fsdpp::ops
