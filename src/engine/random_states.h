#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdpp::engine {

/// States of random generators at one moment.
class RandomStates {
 public:
  RandomStates() = default;
  /// Of the default generators: the CPU's, those of the devices of `tensors`, the current CUDA device's if it is in use.
  [[nodiscard]] static RandomStates of_defaults(const std::vector<at::Tensor>& tensors);
  /// Of the same generators now.
  [[nodiscard]] RandomStates now() const { return RandomStates(generators_); }
  /// Puts the generators back to these states.
  void restore() const;

 private:
  explicit RandomStates(std::vector<at::Generator> generators);
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
};

/// Other states while alive, then those of before.
class RandomStatesGuard {
 public:
  explicit RandomStatesGuard(const RandomStates& states) : before_(states.now()) { states.restore(); }
  ~RandomStatesGuard() { before_.restore(); }
  RandomStatesGuard(const RandomStatesGuard&) = delete;
  RandomStatesGuard& operator=(const RandomStatesGuard&) = delete;

 private:
  RandomStates before_;
};

}  // namespace fsdpp::engine
