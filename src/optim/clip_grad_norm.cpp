#include "fsdpp/optim/clip_grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "fsdpp/comm/communicator.h"
#include "optim/flat_range.h"
#include "optim/grad_norm.h"
#include "optim/kernel_call.h"

namespace fsdpp::optim {
namespace {

constexpr const char* kWho = "clip_grad_norm_";

/// Gradients that are summed together: those of one mesh, or the unsharded ones of one device.
struct Group {
  comm::Mesh* mesh = nullptr;
  c10::Device device = c10::kCPU;
  std::vector<at::Tensor> grads;
};

/// Groups in the same order on every rank, with or without gradients on this one.
std::vector<Group> group_gradients(const ModelParams& params) {
  std::vector<Group> groups;
  const auto group_for = [&](comm::Mesh* mesh, c10::Device device) -> Group& {
    for (Group& g : groups) {
      if (g.mesh == mesh && g.device == device) return g;
    }
    return groups.emplace_back(Group{mesh, device, {}});
  };
  for (const auto& p : params.sharded) {
    Group& group = group_for(p.mesh.get(), p.mesh->device());
    if (at::Tensor grad = checked_grad(kWho, p.name, p.handle, p.local_sizes()); grad.defined())
      group.grads.push_back(std::move(grad));
  }
  for (const auto& p : params.plain) {
    at::Tensor grad = checked_grad(kWho, p.name, p.handle, p.handle.sizes());
    if (grad.defined()) group_for(nullptr, grad.device()).grads.push_back(std::move(grad));
  }
  return groups;
}

/// Neighbouring gradients as one range. Padding between them is not read: it need not be finite after a non-finite
/// step.
std::vector<FlatRange> ranges_of(const std::vector<at::Tensor>& grads) {
  std::vector<FlatRange> ranges;
  for (const at::Tensor& grad : grads) {
    FlatRange range;
    range.arrays[0] = array_of(grad);
    range.numel = grad.numel();
    range.kind[0] = static_cast<int64_t>(grad.scalar_type());
    range.device = grad.device();
    ranges.push_back(range);
  }
  return join_neighbours(std::move(ranges), 0);
}

/// Adds the group's gradients to `sum` (one double on the group's device).
void accumulate(const Group& group, double p, const at::Tensor& sum) {
  std::vector<at::Tensor> dense;
  for (const at::Tensor& grad : group.grads)
    dense.push_back(grad.is_non_overlapping_and_dense() ? grad : grad.contiguous());
  at::Tensor scratch;
  if (group.device.is_cuda())
    scratch = at::empty({static_cast<int64_t>(kernels::norm_scratch_bytes())}, sum.options().dtype(c10::kByte));
  for (const FlatRange& range : ranges_of(dense)) {
    const kernels::NormArgs args{
        range.arrays[0].data,           kernel_dtype(static_cast<c10::ScalarType>(range.kind[0])), range.numel, p,
        sum.mutable_data_ptr<double>(), scratch.defined() ? scratch.mutable_data_ptr() : nullptr};
    run_kernel(
        "norm_accumulate", group.device, [&](auto stream) { return kernels::norm_accumulate(args, stream); },
        [&] { kernels::norm_accumulate_cpu(args); });
  }
}

/// Joins the ranks' sums. The largest value travels as the bits of a non-negative double, which order like the numbers,
/// with NaN above infinity: a maximum of doubles may lose a NaN.
void all_reduce(comm::Mesh& mesh, double p, const at::Tensor& sum) {
  if (mesh.shard_size() == 1) return;
  const cuda::StreamView stream = cuda::current_stream(mesh.device());
  const bool largest = std::isinf(p);
  const comm::Buffer buffer{sum.mutable_data_ptr(), 1, largest ? c10::ScalarType::Long : c10::ScalarType::Double};
  mesh.reduce_comm()
      .all_reduce(buffer, buffer, largest ? comm::ReduceOp::Max : comm::ReduceOp::Sum, stream, {"grad_norm"})
      .wait(stream);
}

/// Sum (or maximum) over all groups. Unsharded gradients are equal on all ranks: they join after the all-reduce.
double total(const std::vector<Group>& groups, double p) {
  std::vector<at::Tensor> sums;
  for (const Group& group : groups) {
    if (group.mesh == nullptr) continue;
    sums.push_back(at::zeros({1}, at::TensorOptions(group.device).dtype(c10::kDouble)));
    accumulate(group, p, sums.back());
    all_reduce(*group.mesh, p, sums.back());
  }
  for (const Group& group : groups) {
    if (group.mesh != nullptr) continue;
    at::Tensor sum;
    for (const at::Tensor& s : sums) {
      if (s.device() == group.device) sum = s;
    }
    if (!sum.defined()) sum = sums.emplace_back(at::zeros({1}, at::TensorOptions(group.device).dtype(c10::kDouble)));
    accumulate(group, p, sum);
  }
  double result = 0;
  for (const at::Tensor& sum : sums) {
    const double value = sum.item<double>();
    if (std::isinf(p)) {
      result = value > result || std::isnan(value) ? value : result;
    } else {
      result += value;
    }
  }
  return result;
}

double norm_of(const std::vector<Group>& groups, double p) {
  FSDPP_ENFORCE(p > 0, ConfigError, "{}: expected an order p > 0 or infinity, got {}", kWho, p);
  const double sum = total(groups, p);
  if (std::isinf(p)) return sum;
  return p == 2.0 ? std::sqrt(sum) : std::pow(sum, 1.0 / p);
}

void scale(const Group& group, double coefficient) {
  const at::Tensor factor = at::full({1}, coefficient, at::TensorOptions(group.device).dtype(c10::kDouble));
  std::vector<at::Tensor> dense;
  for (const at::Tensor& grad : group.grads) {
    if (grad.is_non_overlapping_and_dense()) {
      dense.push_back(grad);
    } else {
      grad.mul_(factor);
    }
  }
  for (const FlatRange& range : ranges_of(dense)) {
    const kernels::DType dtype = kernel_dtype(static_cast<c10::ScalarType>(range.kind[0]));
    const auto* value = factor.const_data_ptr<double>();
    char* data = range.arrays[0].data;
    run_kernel(
        "scale_by", group.device,
        [&](auto stream) { return kernels::scale_by(data, dtype, range.numel, value, stream); },
        [&] { kernels::scale_by_cpu(data, dtype, range.numel, value); });
  }
}

}  // namespace

double grad_norm_of(const ModelParams& params, double p) {
  const at::NoGradGuard no_grad;
  return norm_of(group_gradients(params), p);
}

double clip_grads_of(const ModelParams& params, double max_norm, double p, bool error_if_nonfinite) {
  const at::NoGradGuard no_grad;
  const std::vector<Group> groups = group_gradients(params);
  const double norm = norm_of(groups, p);
  FSDPP_ENFORCE(
      !error_if_nonfinite || std::isfinite(norm), Error,
      "{}: expected a finite norm of order {}, got {}. Try: a smaller learning rate, or error_if_nonfinite = false",
      kWho, p, norm);
  double coefficient = max_norm / (norm + 1e-6);
  if (coefficient > 1.0) coefficient = 1.0;  // NaN stays NaN
  for (const Group& group : groups) {
    if (!group.grads.empty()) scale(group, coefficient);
  }
  return norm;
}

double grad_norm(const torch::nn::Module& model, double p) { return grad_norm_of(collect_params(model), p); }

double clip_grad_norm_(const torch::nn::Module& model, double max_norm, double p, bool error_if_nonfinite) {
  return clip_grads_of(collect_params(model), max_norm, p, error_if_nonfinite);
}

}  // namespace fsdpp::optim
