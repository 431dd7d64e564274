#pragma once
#include <ATen/core/Tensor.h>

#include "shard/kernel_call.h"

/// Calls of kernels/ by operators.
namespace fsdpp::ops {

/// Kernels read a parameter's memory past the dispatcher, where [Note: Use guard] sits. So they ask first: as there, UsageError
/// for a sharded parameter in forward; in backward its unit is gathered if nobody announced it.
void expect_memory(const at::Tensor& parameter, const char* op);

/// The same for a parameter on CUDA whose sizes and memory decide how it is multiplied, before an operator's guard sees
/// it.
inline void expect_gathered(const at::Tensor& weight) {
  if (weight.is_cuda()) expect_memory(weight, "fsdpp::product");
}

/// Throws UsageError unless the tensors (undefined ones aside) are on one CPU or CUDA device and of one dtype that the kernels
/// know.
void expect_alike(const char* op, std::initializer_list<at::Tensor> tensors);

/// The dtype that kernels compute and sum in.
[[nodiscard]] inline c10::ScalarType compute_type(const at::Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// nullptr for an undefined tensor.
[[nodiscard]] inline void* data_of(const at::Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }
[[nodiscard]] inline at::Tensor dense(const at::Tensor& t) { return t.defined() ? t.contiguous() : t; }

/// The CUDA launcher on the current stream of the tensor's device, or the CPU twin.
template <class Args>
void run(const char* what, const at::Tensor& on, const Args& args, int (*launch)(const Args&, CUstream_st*),
         void (*twin)(const Args&)) {
  shard::run_kernel(
      what, cuda::current_stream(on.device()), [&](auto stream) { return launch(args, stream); }, [&] { twin(args); });
}

}  // namespace fsdpp::ops
