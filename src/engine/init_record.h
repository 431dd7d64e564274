#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdpp::engine {

/// [Note: Deferred initialisation] A tensor that DeferredInit puts on the meta device carries, in its storage, the steps that gave
/// its elements their values, and the use guard's dispatch key, so that operators on it go on being recorded after the scope.
/// materialize() runs the steps for the elements that a rank owns (init_fill.h).

/// Elements of a storage: `numel` in a row from `offset` when `dims` is empty, else nested dimensions, strides falling.
struct Region {
  struct Dim {
    int64_t size, stride;
  };
  int64_t offset = 0, numel = 0;
  std::vector<Dim> dims;
  [[nodiscard]] bool in_a_row() const noexcept { return dims.empty(); }
  [[nodiscard]] int64_t end() const noexcept;
  [[nodiscard]] bool contains(int64_t element) const noexcept;
};
inline const Region kEverything{0, int64_t{1} << 62, {}};
/// nullopt for a view whose elements overlap or interleave in a way that Region does not know.
[[nodiscard]] std::optional<Region> region_of(const at::Tensor& tensor);

struct ReplayNode;

/// One step: what an operator did to a region. Steps up to Normal overwrite it. Values are rounded to `dtype` after each.
struct InitStep {
  enum class Kind { Undefined, Unknown, Replay, Constant, Uniform, Normal, Add, Multiply, Divide, Clamp, Round };
  Kind kind = Kind::Undefined;
  double a = 0, b = 0;  ///< constant; low, high; mean, deviation; operand; bounds
  std::string op;       ///< the operator that made it
  std::shared_ptr<const ReplayNode> replay;  ///< its value, from element `skip` on, goes to the region
  int64_t skip = 0;
  Region region = {};
  c10::ScalarType dtype = c10::ScalarType::Float;
  [[nodiscard]] bool overwrites() const noexcept { return kind <= Kind::Normal; }
};
using InitSteps = std::vector<InitStep>;

/// What is known of a tensor's elements: steps by element of its storage, and where the tensor lies in it.
struct InitSnapshot {
  InitSteps steps;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  [[nodiscard]] int64_t numel() const noexcept;
  [[nodiscard]] bool is_contiguous() const noexcept;
};

/// A deterministic operator without side effects, to be run again on the CPU: arguments with snapshots in the place of tensors.
struct ReplayNode {
  c10::OperatorHandle op;
  std::vector<c10::IValue> args;
  struct Input {
    size_t arg;
    InitSnapshot snapshot;
  };
  std::vector<Input> inputs;  ///< in the order of the arguments; several of one argument make a list
  size_t output = 0;
};

/// Whether values of the dtype can be computed step by step (complex and exotic ones can only be replayed).
[[nodiscard]] bool computes(c10::ScalarType dtype) noexcept;

/// The steps recorded in a tensor's storage, or nullptr.
[[nodiscard]] InitSteps* recorded_steps(const at::Tensor& tensor);
/// Whether the tensor's elements are those that the steps count: no view as a dtype of another width. REQUIRES: it has a record.
[[nodiscard]] bool views_as_recorded(const at::Tensor& tensor);
/// Gives a meta tensor, fresh from an operator, a record of `steps`.
void start_record(const at::Tensor& tensor, InitSteps steps);
/// Adds a step; drops those that it overwrites altogether.
void add_step(InitSteps& steps, InitStep step);
/// REQUIRES: the tensor has a record.
[[nodiscard]] InitSnapshot snapshot_of(const at::Tensor& tensor);
/// The steps by logical element of a contiguous snapshot, cut to its elements, or nullopt where a region can't be cut.
[[nodiscard]] std::optional<InitSteps> rebased(const InitSnapshot& snapshot);

/// The operator that keeps a part of the snapshot from being computed: one that fills nothing, or can't be recorded.
[[nodiscard]] std::optional<std::string> obstacle(const InitSnapshot& snapshot);
/// Whether all of it can be computed, and no random step is visible.
[[nodiscard]] bool is_deterministic(const InitSnapshot& snapshot);

}  // namespace fsdpp::engine
