#include "shard/kernel_call.h"

#include <gtest/gtest.h>

#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::shard {
namespace {

TEST(KernelDType, NamesTheFloatingPointTypesTheKernelsKnow) {
  EXPECT_EQ(kernel_dtype(c10::kFloat), kernels::DType::F32);
  EXPECT_EQ(kernel_dtype(c10::kDouble), kernels::DType::F64);
  EXPECT_EQ(kernel_dtype(c10::kHalf), kernels::DType::F16);
  EXPECT_EQ(kernel_dtype(c10::kBFloat16), kernels::DType::BF16);
}

TEST(KernelDType, OfAnUnknownDtypeThenConfigError) {
  for (const auto type : {c10::kLong, c10::kBool, c10::kComplexFloat, c10::kFloat8_e4m3fn}) {
    EXPECT_FALSE(has_kernel_dtype(type));
    EXPECT_THROW((void)kernel_dtype(type), ConfigError);
  }
}

TEST(RunKernel, OnTheCpuCallsTheCpuTwinAndIsDoneAtReturn) {
  bool on_cuda = false;
  bool on_cpu = false;
  run_kernel(
      "test", cuda::StreamView(), [&](CUstream_st*) { return on_cuda = true, 0; }, [&] { on_cpu = true; });
  EXPECT_TRUE(on_cpu);
  EXPECT_FALSE(on_cuda);
  const std::vector<float> from{1.5F, -2.0F};
  std::vector<double> to(2);
  run_cast({.dst = to.data(), .dst_dtype = kernels::DType::F64, .src = from.data(), .numel = 2, .scale = 2.0}, {});
  EXPECT_EQ(to, (std::vector<double>{3.0, -4.0}));
}

}  // namespace
}  // namespace fsdpp::shard
