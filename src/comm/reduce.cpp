#include "comm/reduce.h"

#include <bit>
#include <cstring>
#include <type_traits>

#include <c10/util/Half.h>

#include "base/enforce.h"

// Plain loops over blocks that stay in the first-level cache, written so that the compiler vectorises them.
namespace fsdpp::comm {
namespace {

constexpr int64_t kBlock = 2048;

struct Bf16 {
  uint16_t bits;
};

template <class T>
struct Convert {
  using Acc = T;
  static Acc load(T x) { return x; }
  static T store(Acc x) { return x; }
};
template <>
struct Convert<Bf16> {
  using Acc = float;
  static float load(Bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
  static Bf16 store(float x) {  // round to nearest, ties to even; NaN stays NaN
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return {static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded)};
  }
};
template <>
struct Convert<c10::Half> {
  using Acc = float;
  static float load(c10::Half x) { return c10::detail::fp16_ieee_to_fp32_value(x.x); }
  static c10::Half store(float x) { return {c10::detail::fp16_ieee_from_fp32_value(x), c10::Half::from_bits()}; }
};

template <ReduceOp Op, class A>
inline A combine(A a, A b) {
  if constexpr (Op == ReduceOp::Sum) {
    if constexpr (std::is_integral_v<A>) {  // wraps, without the undefined overflow of signed types
      using U = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  } else {
    const bool take = Op == ReduceOp::Max ? b > a : b < a;
    if constexpr (std::is_floating_point_v<A>) return (take | (b != b)) ? b : a;
    return take ? b : a;
  }
}

template <class T, ReduceOp Op>
void reduce_block(T* out, std::span<const void* const> inputs, int64_t begin, int64_t n) {
  using C = Convert<T>;
  typename C::Acc acc[kBlock];
  const T* first = static_cast<const T*>(inputs[0]) + begin;
  for (int64_t i = 0; i < n; ++i) acc[i] = C::load(first[i]);
  for (size_t r = 1; r < inputs.size(); ++r) {
    const T* next = static_cast<const T*>(inputs[r]) + begin;
    for (int64_t i = 0; i < n; ++i) acc[i] = combine<Op>(acc[i], C::load(next[i]));
  }
  T* to = out + begin;
  for (int64_t i = 0; i < n; ++i) to[i] = C::store(acc[i]);
}

template <class T, ReduceOp Op>
void reduce_all(void* out, std::span<const void* const> inputs, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += kBlock)
    reduce_block<T, Op>(static_cast<T*>(out), inputs, begin, std::min(kBlock, count - begin));
}

template <class T>
void reduce_typed(void* out, std::span<const void* const> inputs, int64_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return reduce_all<T, ReduceOp::Sum>(out, inputs, count);
    case ReduceOp::Max:
      return reduce_all<T, ReduceOp::Max>(out, inputs, count);
    case ReduceOp::Min:
      return reduce_all<T, ReduceOp::Min>(out, inputs, count);
  }
}

}  // namespace

void reduce_ordered(void* out, std::span<const void* const> inputs, int64_t count, c10::ScalarType dtype, ReduceOp op) {
  using c10::ScalarType;
  switch (dtype) {
    case ScalarType::Float:
      return reduce_typed<float>(out, inputs, count, op);
    case ScalarType::Double:
      return reduce_typed<double>(out, inputs, count, op);
    case ScalarType::Half:
      return reduce_typed<c10::Half>(out, inputs, count, op);
    case ScalarType::BFloat16:
      return reduce_typed<Bf16>(out, inputs, count, op);
    case ScalarType::Byte:
      return reduce_typed<uint8_t>(out, inputs, count, op);
    case ScalarType::Char:
      return reduce_typed<int8_t>(out, inputs, count, op);
    case ScalarType::Short:
      return reduce_typed<int16_t>(out, inputs, count, op);
    case ScalarType::Int:
      return reduce_typed<int32_t>(out, inputs, count, op);
    case ScalarType::Long:
      return reduce_typed<int64_t>(out, inputs, count, op);
    default:
      fail<UsageError>("reduction: dtype {} is not supported", c10::toString(dtype));
  }
}

}  // namespace fsdpp::comm
