#include "optim/grad_groups.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <functional>
#include <limits>

#include "base/enforce.h"
#include "engine/registry.h"
#include "engine/unit.h"
#include "fsdpp/comm/communicator.h"
#include "optim/flat_range.h"
#include "shard/kernel_call.h"

namespace fsdpp::optim {
namespace {

/// One double on each device that asks for one.
class Numbers {
 public:
  explicit Numbers(double start) : start_(start) {}

  at::Tensor& on(c10::Device device) {
    for (at::Tensor& number : numbers_) {
      if (number.device() == device) return number;
    }
    return numbers_.emplace_back(at::full({1}, start_, at::TensorOptions(device).dtype(c10::kDouble)));
  }
  [[nodiscard]] const std::vector<at::Tensor>& all() const noexcept { return numbers_; }

 private:
  double start_;
  std::vector<at::Tensor> numbers_;
};

/// One range for each gradient.
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
  return ranges;
}

kernels::DType dtype_of(const FlatRange& range) {
  return shard::kernel_dtype(static_cast<c10::ScalarType>(range.kind[0]));
}

at::Tensor scratch_on(c10::Device device) {
  const auto bytes = static_cast<int64_t>(device.is_cuda() ? kernels::norm_scratch_bytes() : 0);
  return at::empty({bytes}, at::TensorOptions(device).dtype(c10::kByte));
}

/// Neighbouring gradients as one range. Padding between them is not read: it need not be finite after a non-finite
/// step.
std::vector<FlatRange> joined(std::vector<FlatRange> ranges) { return join_neighbours(std::move(ranges), 0); }

/// Adds the gradients' powers to `sums`, each on the device where it is. A group that is not cut is summed gradient by
/// gradient, so that one rank gets the very bits that it gets without sharding.
void accumulate(const GradGroup& group, double p, Numbers& sums) {
  std::vector<at::Tensor> dense;
  for (const at::Tensor& grad : group.grads)
    dense.push_back(grad.is_non_overlapping_and_dense() ? grad : grad.contiguous());
  std::vector<FlatRange> ranges = ranges_of(dense);
  if (group.mesh != nullptr && group.mesh->shard_size() > 1) ranges = joined(std::move(ranges));
  at::Tensor scratch;
  for (const FlatRange& range : ranges) {
    if (range.numel == 0) continue;
    if (!scratch.defined() || scratch.device() != range.device) scratch = scratch_on(range.device);
    const kernels::NormArgs args{
        range.arrays[0].data,      dtype_of(range), range.numel, p, sums.on(range.device).mutable_data_ptr<double>(),
        scratch.mutable_data_ptr()};
    shard::run_kernel(
        "norm_accumulate", cuda::current_stream(range.device),
        [&](auto stream) { return kernels::norm_accumulate(args, stream); },
        [&] { kernels::norm_accumulate_cpu(args); });
  }
}

/// sum += other, or the larger of both (NaN if either is), with `other` on any device.
void join(const at::Tensor& sum, const at::Tensor& other, double p) {
  const at::Tensor here = other.to(sum.device());
  if (std::isinf(p)) {
    sum.copy_(at::maximum(sum, here));
  } else {
    sum.add_(here);
  }
}

at::Tensor joined_on(c10::Device home, Numbers& numbers, double p) {
  const at::Tensor sum = numbers.on(home);
  for (const at::Tensor& other : numbers.all()) {
    if (!other.is_same(sum)) join(sum, other, p);
  }
  return sum;
}

/// Joins the ranks' sums. The largest value travels as the bits of a non-negative double, which order like the numbers,
/// with NaN above infinity: a maximum of doubles may lose a NaN.
void all_reduce(comm::Communicator& comm, const char* label, double p, const at::Tensor& sum) {
  if (comm.size() == 1) return;
  const cuda::StreamView stream = cuda::current_stream(sum.device());
  const bool largest = std::isinf(p);
  const comm::Buffer buffer{sum.mutable_data_ptr(), 1, largest ? c10::ScalarType::Long : c10::ScalarType::Double};
  comm.all_reduce(buffer, buffer, largest ? comm::ReduceOp::Max : comm::ReduceOp::Sum, stream, {label}).wait(stream);
}

/// g *= factor_on(device of g).
void scale_all_by(const std::vector<GradGroup>& groups, const std::function<at::Tensor(c10::Device)>& factor_on) {
  for (const GradGroup& group : groups) {
    std::vector<at::Tensor> dense;
    for (const at::Tensor& grad : group.grads) {
      if (grad.is_non_overlapping_and_dense()) {
        dense.push_back(grad);
      } else {
        grad.mul_(factor_on(grad.device()).reshape({}));
      }
    }
    for (const FlatRange& range : joined(ranges_of(dense))) {
      const at::Tensor factor = factor_on(range.device);
      char* data = range.arrays[0].data;
      shard::run_kernel(
          "scale_by", cuda::current_stream(range.device),
          [&](auto stream) {
            return kernels::scale_by(data, dtype_of(range), range.numel, factor.const_data_ptr<double>(), stream);
          },
          [&] { kernels::scale_by_cpu(data, dtype_of(range), range.numel, factor.const_data_ptr<double>()); });
    }
  }
}

}  // namespace

std::vector<GradGroup> group_gradients(const char* who, const ModelParams& params) {
  std::vector<GradGroup> groups;
  const auto group_for = [&](comm::Mesh* mesh, c10::Device home) -> GradGroup& {
    for (GradGroup& g : groups) {
      if (g.mesh == mesh) return g;
    }
    return groups.emplace_back(GradGroup{mesh, home, {}});
  };
  for (const auto& p : params.sharded) {
    const auto unit = engine::find_unit(p.handle);
    FSDPP_ENFORCE(!unit || !unit->steps_in_backward(), UsageError,
                  "{}: expected gradients until the optimizer's step, got parameter '{}', whose optimizer uses and frees them in "
                  "backward. Try: without step_in_backward",
                  who, p.name);
    GradGroup& group = group_for(p.mesh.get(), p.mesh->device());
    if (at::Tensor grad = checked_grad(who, p.name, p.handle, p.local_sizes()); grad.defined())
      group.grads.push_back(std::move(grad));
  }
  for (const auto& p : params.plain) {
    at::Tensor grad = checked_grad(who, p.name, p.handle, p.handle.sizes());
    if (grad.defined()) group_for(nullptr, grad.device()).grads.push_back(std::move(grad));
  }
  return groups;
}

at::Tensor global_norm_on_device(const std::vector<GradGroup>& groups, double p) {
  std::vector<at::Tensor> sums;
  for (const GradGroup& group : groups) {
    Numbers numbers(0);
    accumulate(group, p, numbers);
    sums.push_back(joined_on(group.home, numbers, p));
    if (group.mesh != nullptr) all_reduce(group.mesh->reduce_comm(), "grad_norm", p, sums.back());
  }
  if (sums.empty()) return at::zeros({1}, c10::kDouble);
  for (size_t i = 1; i < sums.size(); ++i) join(sums[0], sums[i], p);
  if (std::isinf(p)) return sums[0];
  return p == 2.0 ? sums[0].sqrt() : sums[0].pow(1.0 / p);
}

double global_norm(const std::vector<GradGroup>& groups, double p) { return global_norm_on_device(groups, p).item<double>(); }

bool all_finite(const std::vector<GradGroup>& groups) {
  constexpr double kLargest = std::numeric_limits<double>::infinity();
  Numbers numbers(0);
  for (const GradGroup& group : groups) accumulate(group, kLargest, numbers);
  at::Tensor largest = joined_on(groups.empty() ? c10::Device(c10::kCPU) : groups[0].home, numbers, kLargest);
  for (const GradGroup& group : groups) {
    if (group.mesh == nullptr) continue;
    largest = largest.to(group.home);
    all_reduce(group.mesh->reduce_comm(), "grads_are_finite", kLargest, largest);
    all_reduce(group.mesh->replicate_comm(), "grads_are_finite", kLargest, largest);
  }
  return std::isfinite(largest.item<double>());
}

void scale_all(const std::vector<GradGroup>& groups, double coefficient) {
  Numbers factors(coefficient);
  scale_all_by(groups, [&](c10::Device device) { return factors.on(device); });
}

void scale_all(const std::vector<GradGroup>& groups, const at::Tensor& coefficient) {
  scale_all_by(groups, [&](c10::Device device) { return coefficient.to(device); });
}

}  // namespace fsdpp::optim
