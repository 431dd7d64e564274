#include "shard/kernel_call.h"

namespace fsdpp::shard {

bool has_kernel_dtype(c10::ScalarType type) noexcept {
  return type == c10::ScalarType::Float || type == c10::ScalarType::Double || type == c10::ScalarType::Half ||
         type == c10::ScalarType::BFloat16;
}

kernels::DType kernel_dtype(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return kernels::DType::F32;
    case c10::ScalarType::Double:
      return kernels::DType::F64;
    case c10::ScalarType::Half:
      return kernels::DType::F16;
    case c10::ScalarType::BFloat16:
      return kernels::DType::BF16;
    default:
      fail<ConfigError>("dtype {} can't be cast, reduced or updated: expected float32, float64, float16 or bfloat16",
                        c10::toString(type));
  }
}

void run_cast(const kernels::CastArgs& args, cuda::StreamView stream) {
  run_kernel(
      "cast", stream, [&](auto handle) { return kernels::cast(args, handle); }, [&] { kernels::cast_cpu(args); });
}

void run_pack(const kernels::PackArgs& args, cuda::StreamView stream) {
  run_kernel(
      "pack", stream, [&](auto handle) { return kernels::pack(args, handle); }, [&] { kernels::pack_cpu(args); });
}

}  // namespace fsdpp::shard
