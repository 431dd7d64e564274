#include "engine/init_fill.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <span>

#include "base/enforce.h"
#include "engine/philox.h"

namespace fsdpp::engine {
namespace {

using Kind = InitStep::Kind;
constexpr int64_t kBlock = 4096;  // elements computed at a time, in double

/// Calls f(T()) for the C++ type of a dtype that computes() knows.
template <class F>
void with_type(c10::ScalarType dtype, F&& f) {
  switch (dtype) {
    case c10::ScalarType::Float: return f(float());
    case c10::ScalarType::Double: return f(double());
    case c10::ScalarType::Half: return f(c10::Half());
    case c10::ScalarType::BFloat16: return f(c10::BFloat16());
    case c10::ScalarType::Long: return f(int64_t());
    case c10::ScalarType::Int: return f(int32_t());
    case c10::ScalarType::Short: return f(int16_t());
    case c10::ScalarType::Char: return f(int8_t());
    case c10::ScalarType::Byte: return f(uint8_t());
    case c10::ScalarType::Bool: return f(bool());
    default: fail<ConfigError>("values of dtype {} can't be computed step by step", c10::toString(dtype));
  }
}

template <class T>
constexpr bool kReduced = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

template <class T>
T to_type(double value) {
  if constexpr (std::is_same_v<T, bool>) return value != 0;
  else if constexpr (kReduced<T>) return T(static_cast<float>(value));
  else return static_cast<T>(value);
}

template <class T>
double rounded(double value) {
  return static_cast<double>(to_type<T>(value));
}

// Operands of arithmetic on 16-bit and 32-bit floats are floats, as in LibTorch.
template <class T>
double operand(double value) {
  return kReduced<T> || std::is_same_v<T, float> ? static_cast<double>(static_cast<float>(value)) : value;
}

template <class T>
double applied(const InitStep& step, double x) {
  switch (step.kind) {
    case Kind::Constant: return rounded<T>(step.a);
    case Kind::Add: return rounded<T>(x + operand<T>(step.a));
    case Kind::Multiply: return rounded<T>(x * operand<T>(step.a));
    case Kind::Divide: return rounded<T>(x / operand<T>(step.a));
    case Kind::Clamp: return std::min(std::max(x, operand<T>(step.a)), operand<T>(step.b));
    default: return rounded<T>(x);
  }
}

int64_t storage_element(const InitSnapshot& s, int64_t logical) {
  int64_t element = s.offset;
  for (size_t d = s.sizes.size(); d-- > 0;) {
    element += logical % s.sizes[d] * s.strides[d];
    logical /= s.sizes[d];
  }
  return element;
}

at::Tensor value_of(const ReplayNode& node) {
  torch::jit::Stack stack(node.args.begin(), node.args.end());
  for (size_t i = 0; i < node.inputs.size();) {
    const size_t arg = node.inputs[i].arg;
    c10::List<at::Tensor> values;
    for (; i < node.inputs.size() && node.inputs[i].arg == arg; ++i) values.push_back(value_of(node.inputs[i].snapshot));
    const bool list = node.op.schema().arguments()[arg].type()->kind() == c10::TypeKind::ListType;
    stack[arg] = list ? c10::IValue(values) : c10::IValue(values.get(0));
  }
  node.op.callBoxed(&stack);
  return stack.at(node.output).toTensor().contiguous();
}

at::Tensor exact_double(const at::Tensor& value, const std::string& op) {
  auto result = value.to(at::kDouble);
  FSDPP_ENFORCE(!c10::isIntegralType(value.scalar_type(), true) || result.to(value.scalar_type()).equal(value), UsageError,
                "deferred initialisation: integers made by {} are too large to be computed with", op);
  return result;
}

}  // namespace

at::Tensor value_of(const InitSnapshot& snapshot) {
  auto value = at::empty(snapshot.sizes, at::TensorOptions(c10::kCPU).dtype(snapshot.dtype));
  InitValues(snapshot, {}).fill(value, {0, snapshot.numel()});
  return value;
}

InitValues::InitValues(InitSnapshot snapshot, RandomKey key)
    : snapshot_(std::move(snapshot)), key_(key), contiguous_(snapshot_.is_contiguous()) {
  const at::NoGradGuard no_grad;
  const auto& steps = snapshot_.steps;
  if (steps.size() == 1 && steps[0].kind == Kind::Replay && contiguous_) {
    const auto value = value_of(*steps[0].replay).view({-1});
    whole_ = value.narrow(0, steps[0].skip + snapshot_.offset - steps[0].region.offset, snapshot_.numel());
    return;
  }
  for (const auto& step : steps)
    replayed_.push_back(step.kind == Kind::Replay ? exact_double(value_of(*step.replay).view({-1}), step.op) : at::Tensor());
}

void InitValues::compute(int64_t first, std::span<double> x) const {
  const auto n = static_cast<int64_t>(x.size());
  const int64_t start = snapshot_.offset + first;
  auto each = [&](const Region& region, auto&& f) {
    if (contiguous_ && region.in_a_row()) {
      const int64_t end = std::min(region.end() - start, n);
      for (int64_t i = std::max<int64_t>(region.offset - start, 0); i < end; ++i) f(i, start + i);
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t element = contiguous_ ? start + i : storage_element(snapshot_, first + i);
      if (region.contains(element)) f(i, element);
    }
  };
  std::array<double, kBlock> drawn;
  for (size_t k = 0; k < snapshot_.steps.size(); ++k) {
    const auto& step = snapshot_.steps[k];
    const auto numbers = std::span(drawn).first(x.size());
    if (step.kind == Kind::Uniform) uniform_numbers(key_.seed, key_.stream, first, numbers, step.a, step.b);
    if (step.kind == Kind::Normal) normal_numbers(key_.seed, key_.stream, first, numbers, step.a, step.b);
    const bool random = step.kind == Kind::Uniform || step.kind == Kind::Normal;
    const double* value = replayed_[k].defined() ? replayed_[k].const_data_ptr<double>() + step.skip : nullptr;
    with_type(step.dtype, [&](auto type) {
      using T = decltype(type);
      auto at = [&](int64_t i) -> double& { return x[static_cast<size_t>(i)]; };
      if (random) each(step.region, [&](int64_t i, int64_t) { at(i) = rounded<T>(numbers[static_cast<size_t>(i)]); });
      else if (value) each(step.region, [&](int64_t i, int64_t element) { at(i) = value[element - step.region.offset]; });
      else each(step.region, [&](int64_t i, int64_t) { at(i) = applied<T>(step, at(i)); });
    });
  }
}

void InitValues::write(int64_t first, int64_t count, void* out) const {
  at::parallel_for(0, (count + kBlock - 1) / kBlock, 16, [&](int64_t begin, int64_t end) {
    std::array<double, kBlock> values{};
    for (int64_t block = begin; block < end; ++block) {
      const int64_t at = block * kBlock, n = std::min(kBlock, count - at);
      const auto some = std::span(values).first(static_cast<size_t>(n));
      compute(first + at, some);
      with_type(snapshot_.dtype, [&](auto type) {
        using T = decltype(type);
        std::transform(some.begin(), some.end(), static_cast<T*>(out) + at, to_type<T>);
      });
    }
  });
}

void InitValues::fill(const at::Tensor& local, shard::Range range) const {
  if (range.size() == 0) return;
  const at::NoGradGuard no_grad;
  const auto flat = local.view({-1});
  if (whole_.defined()) {
    flat.copy_(whole_.narrow(0, range.begin, range.size()));
    return;
  }
  if (local.is_cpu()) return write(range.begin, range.size(), local.mutable_data_ptr());
  const int64_t block = std::min<int64_t>(kStagingBytes / local.element_size(), range.size());
  const auto staging = at::empty({block}, at::TensorOptions(c10::kCPU).dtype(snapshot_.dtype));
  for (int64_t at = 0; at < range.size(); at += block) {
    const int64_t n = std::min(block, range.size() - at);
    write(range.begin + at, n, staging.mutable_data_ptr());
    flat.narrow(0, at, n).copy_(staging.narrow(0, 0, n));
  }
}

}  // namespace fsdpp::engine
