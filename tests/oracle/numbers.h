#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdpp::test::oracle {

/// The numbers of a case: a pure function of (case, stream, index), computed alike by numbers.py, so that no file of weights and
/// inputs has to pass between the two languages.
[[nodiscard]] uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index);
/// In [-1, 1), exact in fp64.
[[nodiscard]] double random_number(uint64_t seed, uint64_t stream, uint64_t index);

/// Fills `tensor` in row-major order of its shape, whatever its strides, with center + spread · random_number.
void fill(const at::Tensor& tensor, uint64_t seed, uint64_t stream, double center, double spread);
/// int64 tensor of random_bits % limit.
[[nodiscard]] at::Tensor random_ids(at::IntArrayRef sizes, uint64_t seed, uint64_t stream, int64_t limit);

}  // namespace fsdpp::test::oracle
