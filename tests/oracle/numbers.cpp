#include "oracle/numbers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace fsdpp::test::oracle {
namespace {

uint64_t splitmix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) { return splitmix(splitmix(splitmix(seed) + stream) + index); }

double random_number(uint64_t seed, uint64_t stream, uint64_t index) {
  return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1p-52 - 1.0;
}

void fill(const at::Tensor& tensor, uint64_t seed, uint64_t stream, double center, double spread) {
  at::NoGradGuard no_grad;
  auto values = at::empty(tensor.sizes(), at::kDouble);
  auto* p = values.mutable_data_ptr<double>();
  for (int64_t i = 0; i < values.numel(); ++i) p[i] = center + spread * random_number(seed, stream, static_cast<uint64_t>(i));
  tensor.copy_(values);
}

at::Tensor random_ids(at::IntArrayRef sizes, uint64_t seed, uint64_t stream, int64_t limit) {
  auto ids = at::empty(sizes, at::kLong);
  auto* p = ids.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i)
    p[i] = static_cast<int64_t>(random_bits(seed, stream, static_cast<uint64_t>(i)) % static_cast<uint64_t>(limit));
  return ids;
}

}  // namespace fsdpp::test::oracle
