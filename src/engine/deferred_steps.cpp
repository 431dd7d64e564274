#include "engine/deferred_call.h"

#include <ATen/ops/_local_scalar_dense.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

namespace fsdpp::engine {
namespace {

using c10::IValue;
using Kind = InitStep::Kind;
using Names = std::unordered_set<std::string_view>;

std::optional<double> exact(const c10::Scalar& scalar) {
  if (scalar.isComplex()) return std::nullopt;
  if (!scalar.isIntegral(/*includeBool=*/false)) return scalar.to<double>();
  const auto value = scalar.to<int64_t>();
  constexpr int64_t kExact = int64_t{1} << 53;
  return value >= -kExact && value <= kExact ? std::optional(static_cast<double>(value)) : std::nullopt;
}

InitStep step(Kind kind, const Call& call, c10::ScalarType dtype, double a = 0, double b = 0) {
  InitStep s;
  s.kind = kind, s.a = a, s.b = b, s.op = call.name(), s.dtype = dtype;
  if (!computes(dtype) && kind != Kind::Undefined) s.kind = Kind::Unknown;
  return s;
}

InitStep unknown(const Call& call, c10::ScalarType dtype) { return step(Kind::Unknown, call, dtype); }

InitStep replayed(std::shared_ptr<const ReplayNode> node, const Call& call, c10::ScalarType dtype) {
  InitStep s;
  s.kind = Kind::Replay, s.op = call.name(), s.replay = std::move(node), s.dtype = dtype;
  return s;
}

template <class Number>
InitStep filled(const Call& call, c10::ScalarType dtype, const Number& value) {
  return value ? step(Kind::Constant, call, dtype, *value) : unknown(call, dtype);
}

// -- operators that make a tensor ----------------------------------------------------------------------------------------

// What is known of every element of a new tensor from the operator's name and scalars.
std::optional<InitStep> made_from_scalars(const Call& call, c10::ScalarType dtype) {
  using Rule = InitStep (*)(const Call&, c10::ScalarType);
  static constexpr Rule kUndefined = [](const Call& c, c10::ScalarType t) { return step(Kind::Undefined, c, t); };
  static constexpr Rule kZeros = [](const Call& c, c10::ScalarType t) { return step(Kind::Constant, c, t, 0); };
  static constexpr Rule kOnes = [](const Call& c, c10::ScalarType t) { return step(Kind::Constant, c, t, 1); };
  static constexpr Rule kFull = [](const Call& c, c10::ScalarType t) { return filled(c, t, c.number("fill_value")); };
  static constexpr Rule kScalar = [](const Call& c, c10::ScalarType t) { return filled(c, t, c.number("s")); };
  static constexpr Rule kUniform = [](const Call& c, c10::ScalarType t) { return step(Kind::Uniform, c, t, 0, 1); };
  static constexpr Rule kNormal = [](const Call& c, c10::ScalarType t) { return step(Kind::Normal, c, t, 0, 1); };
  static const std::unordered_map<std::string_view, Rule> kRules = {
      {"aten::empty", kUndefined},      {"aten::empty_strided", kUndefined}, {"aten::empty_like", kUndefined},
      {"aten::new_empty", kUndefined},  {"aten::new_empty_strided", kUndefined}, {"aten::empty_permuted", kUndefined},
      {"aten::zeros", kZeros},          {"aten::zeros_like", kZeros},        {"aten::new_zeros", kZeros},
      {"aten::ones", kOnes},            {"aten::ones_like", kOnes},          {"aten::new_ones", kOnes},
      {"aten::full", kFull},            {"aten::full_like", kFull},          {"aten::new_full", kFull},
      {"aten::scalar_tensor", kScalar}, {"aten::rand", kUniform},            {"aten::rand_like", kUniform},
      {"aten::randn", kNormal},         {"aten::randn_like", kNormal}};
  const auto rule = kRules.find(call.name());
  return rule == kRules.end() ? std::nullopt : std::optional(rule->second(call, dtype));
}

// A number added to or multiplied with every element.
std::optional<InitStep> scaled(const Call& call, c10::ScalarType dtype) {
  std::string_view name = call.name();
  if (name.ends_with('_')) name.remove_suffix(1);
  const auto other = call.number("other");
  if (!other) return std::nullopt;
  const auto alpha = call.find("alpha") ? call.number("alpha") : std::optional(1.0);
  const auto* rounding = call.find("rounding_mode");
  if (!alpha || (rounding && !rounding->isNone())) return std::nullopt;
  if (name == "aten::mul") return step(Kind::Multiply, call, dtype, *other);
  if (name == "aten::div") return step(Kind::Divide, call, dtype, *other);
  if (name == "aten::add") return step(Kind::Add, call, dtype, *alpha * *other);
  if (name == "aten::sub") return step(Kind::Add, call, dtype, -*alpha * *other);
  return std::nullopt;
}

// Whether every step does the same to all elements, so that it does not matter how they lie.
bool in_any_order(const InitSteps& steps, int64_t numel) {
  return std::all_of(steps.begin(), steps.end(), [&](auto& s) {
    return s.kind != Kind::Replay && s.region.in_a_row() && s.region.offset == 0 && s.region.numel == numel;
  });
}

// The steps of `self` carried over to a new tensor, or nullopt.
std::optional<InitSteps> carried(const Call& call, const at::Tensor& output) {
  static const Names kCopies = {"aten::clone", "aten::to", "aten::_to_copy", "aten::contiguous"};
  const auto* self = call.tensor("self");
  if (!self || !recorded_steps(*self) || output.sizes() != self->sizes()) return std::nullopt;
  auto steps = rebased(snapshot_of(*self));
  if (!steps || !(output.is_contiguous() || (output.is_non_overlapping_and_dense() && in_any_order(*steps, output.numel())))) return std::nullopt;
  const auto dtype = output.scalar_type();
  std::optional<InitStep> last;
  if (kCopies.contains(call.name())) {
    if (dtype == self->scalar_type()) return steps;
    last = step(Kind::Round, call, dtype);
    if (!computes(self->scalar_type()) || last->kind == Kind::Unknown) return std::nullopt;
  } else if (dtype == self->scalar_type()) {
    last = scaled(call, dtype);
  }
  if (!last) return std::nullopt;
  last->region = {0, output.numel(), {}};
  add_step(*steps, std::move(*last));
  return steps;
}

// -- replay --------------------------------------------------------------------------------------------------------------

// Adds what an argument's tensors are to the node; false where that is not known, random or large.
bool add_inputs(ReplayNode& node, size_t arg) {
  bool known = true;
  auto& value = node.args[arg];
  if (value.isList() && !value.isTensorList()) return !any_tensor({&value, 1});
  const bool list = value.isTensorList();
  each_tensor(value, [&](const at::Tensor& t) {
    if (t.nbytes() > kReplayBytes) known = false;
    if (!known) return;
    if (!recorded_steps(t)) {
      known = t.is_cpu() && !list && t.layout() == c10::kStrided;
      if (known) value = t.detach().clone();
      return;
    }
    auto snapshot = snapshot_of(t);
    known = is_deterministic(snapshot);
    node.inputs.push_back({arg, std::move(snapshot)});
  });
  if (known && !node.inputs.empty() && node.inputs.back().arg == arg) value = IValue();
  return known;
}

// `in_place`: the operator writes its `self` and returns it; run again, it has a `self` of its own.
std::shared_ptr<const ReplayNode> replay_of(const Call& call, size_t output, bool in_place) {
  if (call.op.schema().is_mutable() != in_place || call.op.hasTag(at::Tag::nondeterministic_seeded)) return nullptr;
  auto node = std::make_shared<ReplayNode>(ReplayNode{call.op, call.args, {}, output});
  for (size_t i = 0; i < node->args.size(); ++i)
    if (!add_inputs(*node, i)) return nullptr;
  set_argument(call, node->args, "device", c10::Device(c10::kCPU));
  set_argument(call, node->args, "pin_memory", IValue());
  return node;
}

// -- operators that write to a tensor ------------------------------------------------------------------------------------

// What a write does to every element of `self`; nullopt if only the operator itself knows.
std::optional<InitStep> written(const Call& call, c10::ScalarType dtype) {
  const auto& name = call.name();
  if (name == "aten::zero_") return step(Kind::Constant, call, dtype, 0);
  if (name == "aten::fill_") return filled(call, dtype, call.number("value"));
  if (name == "aten::uniform_") return step(Kind::Uniform, call, dtype, call.number("from").value(), call.number("to").value());
  if (name == "aten::normal_") return step(Kind::Normal, call, dtype, call.number("mean").value(), call.number("std").value());
  const bool clamps = name == "aten::clamp_" || name == "aten::clamp_min_" || name == "aten::clamp_max_";
  if (clamps && !call.tensor("min") && !call.tensor("max"))
    return step(Kind::Clamp, call, dtype, call.number("min").value_or(-HUGE_VAL), call.number("max").value_or(HUGE_VAL));
  return name.ends_with('_') ? scaled(call, dtype) : std::nullopt;
}

// The steps of the source of a copy_, by element of the target; nullopt if they can't be carried over.
std::optional<InitSteps> copied(const Call& call, const at::Tensor& target) {
  const auto* source = call.tensor("src");
  if (call.name() != "aten::copy_" || !source || !target.is_contiguous() || source->sizes() != target.sizes()) return std::nullopt;
  std::optional<InitSteps> steps;
  if (recorded_steps(*source)) {
    steps = rebased(snapshot_of(*source));
  } else if (source->is_cpu() && source->nbytes() <= kReplayBytes) {
    static const auto clone = c10::Dispatcher::singleton().findSchemaOrThrow("aten::clone", "");
    auto node = std::make_shared<ReplayNode>(ReplayNode{clone, {source->detach().contiguous().clone(), IValue()}, {}, 0});
    steps = InitSteps{replayed(std::move(node), call, source->scalar_type())};
    steps->front().region = {0, source->numel(), {}};
  }
  if (!steps || source->scalar_type() == target.scalar_type()) return steps;
  if (!computes(source->scalar_type()) || !computes(target.scalar_type())) return std::nullopt;
  auto round = step(Kind::Round, call, target.scalar_type());
  round.region = {0, target.numel(), {}};
  add_step(*steps, std::move(round));
  return steps;
}

}  // namespace

std::optional<double> Call::number(std::string_view argument) const {
  const auto* value = find(argument);
  if (!value) return std::nullopt;
  if (value->isScalar()) return exact(value->toScalar());
  if (!value->isTensor()) return std::nullopt;
  const auto& t = value->toTensor();
  if (!t.defined() || t.dim() != 0) return std::nullopt;
  if (t.is_cpu()) return exact(at::_local_scalar_dense(t));
  const auto steps = recorded_steps(t) ? rebased(snapshot_of(t)) : std::nullopt;
  return steps && steps->size() == 1 && steps->front().kind == Kind::Constant ? std::optional(steps->front().a) : std::nullopt;
}

bool any_tensor(std::span<const IValue> values) {
  bool found = false;
  for (const auto& v : values) each_tensor(v, [&](const at::Tensor&) { found = true; });
  return found;
}

void set_argument(const Call& call, std::vector<IValue>& args, std::string_view name, const IValue& value) {
  const auto& declared = call.op.schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i)
    if (declared[i].name() == name) args[i] = value;
}

InitSteps steps_of_output(const Call& call, const at::Tensor& output, size_t index) {
  const auto dtype = output.scalar_type();
  const Region all{0, static_cast<int64_t>(output.storage().nbytes() / output.element_size()), {}};
  auto one = [&](InitStep s) {
    s.region = all;
    return InitSteps{std::move(s)};
  };
  if (auto made = made_from_scalars(call, dtype)) return one(std::move(*made));
  if (auto steps = carried(call, output)) return std::move(*steps);
  if (output.is_contiguous())
    if (auto node = replay_of(call, index, false)) {
      return one(replayed(std::move(node), call, dtype));
    }
  return one(unknown(call, dtype));
}

void record_write(const Call& call, const at::Tensor& target, bool is_self) {
  auto& steps = *recorded_steps(target);
  const auto dtype = target.scalar_type();
  auto region = region_of(target);
  const bool same_width = views_as_recorded(target);
  if (is_self && region && same_width) {
    if (auto source = copied(call, target)) {
      for (auto& s : *source) {
        s.region.offset += target.storage_offset();
        add_step(steps, std::move(s));
      }
      return;
    }
    auto s = written(call, dtype);
    if (!s && call.name().ends_with('_') && region->in_a_row() && target.is_contiguous())
      if (auto node = replay_of(call, 0, true)) s = replayed(std::move(node), call, dtype);
    if (s) {
      s->region = std::move(*region);
      return add_step(steps, std::move(*s));
    }
  }
  auto lost = unknown(call, dtype);
  lost.region = region && same_width ? std::move(*region) : kEverything;
  add_step(steps, std::move(lost));
}

}  // namespace fsdpp::engine
