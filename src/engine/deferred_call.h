#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/init_record.h"

namespace fsdpp::engine {

inline constexpr size_t kReplayBytes = size_t{64} << 20;  ///< larger values do not serve as input of a replay

/// One call of an operator: its arguments as they were before.
struct Call {
  Call(const c10::OperatorHandle& called, at::ArrayRef<c10::IValue> arguments) : op(called), args(arguments.begin(), arguments.end()) {}
  const c10::OperatorHandle& op;
  std::vector<c10::IValue> args;

  [[nodiscard]] const std::string& name() const { return op.operator_name().name; }
  [[nodiscard]] const c10::IValue* find(std::string_view argument) const {
    const auto& declared = op.schema().arguments();
    for (size_t i = 0; i < declared.size(); ++i)
      if (declared[i].name() == argument) return &args[i];
    return nullptr;
  }
  /// A number argument, also one given as a 0-dim CPU tensor, if a double holds it exactly.
  [[nodiscard]] std::optional<double> number(std::string_view argument) const;
  [[nodiscard]] const at::Tensor* tensor(std::string_view argument) const {
    const auto* value = find(argument);
    return value && value->isTensor() && value->toTensor().defined() ? &value->toTensor() : nullptr;
  }
};

/// Calls f for each defined tensor in a value, also in lists.
template <class F>
void each_tensor(const c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector())
      if (t.defined()) f(t);
  } else if (value.isList()) {
    for (const c10::IValue& v : value.toListRef()) each_tensor(v, f);
  }
}

[[nodiscard]] bool any_tensor(std::span<const c10::IValue> values);
/// Replaces the argument of this name in `args`, if the operator has one.
void set_argument(const Call& call, std::vector<c10::IValue>& args, std::string_view name, const c10::IValue& value);

/// The steps of a tensor that the call made: output `index`.
[[nodiscard]] InitSteps steps_of_output(const Call& call, const at::Tensor& output, size_t index);
/// Adds to the record of `target` what the call did to it; `is_self`: as its `self`. REQUIRES: it has a record.
void record_write(const Call& call, const at::Tensor& target, bool is_self);

}  // namespace fsdpp::engine
