#pragma once
#include <c10/core/GradMode.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdpp/engine/no_cast.h"
#include "fsdpp/engine/recomputation.h"
#include "fsdpp/engine/visit_tensors.h"

/// Activation recomputation, as torch.utils.checkpoint(…, use_reentrant=False): less memory for one more forward.
///
///     x = fsdpp::checkpoint(block, x);                                        // a module holder
///     x = fsdpp::checkpoint([this](at::Tensor h) { return ffn(norm(h)); }, x);  // part of one
namespace fsdpp {
namespace detail {

// How an argument is kept and given to the second run: as the first run got it, T& or T&&.
template <class T>
struct Keeping {
  using Stored = std::decay_t<T>;
  using Passed = std::conditional_t<std::is_same_v<Stored, std::remove_cvref_t<T>>, T&&, Stored>;
  static auto& value(auto& argument) { return argument; }
  static Passed pass(Stored& stored) { return static_cast<Passed>(stored); }
};
template <class T>
struct Keeping<NoCast<T>> {
  using Stored = std::remove_cvref_t<T>;
  static auto& value(auto& argument) { return argument.value; }
  static NoCast<T> pass(Stored& stored) { return {static_cast<T&&>(stored)}; }
};

// A function and its arguments, kept for another run; their tensors are kept elsewhere.
template <class Fn, class... Args>
class KeptCall {
 public:
  static_assert(std::is_copy_constructible_v<Fn>, "checkpoint runs the function again in backward: it must be copyable");
  static_assert((std::is_copy_constructible_v<typename Keeping<Args>::Stored> && ...),
                "checkpoint keeps the arguments for the run in backward: they must be copyable. Capture others in the function.");
  explicit KeptCall(const Fn& fn, const std::remove_reference_t<Args>&... args) : fn_(fn), args_(Keeping<Args>::value(args)...) {}

  [[nodiscard]] std::vector<at::Tensor> take_tensors() {
    std::vector<at::Tensor> tensors;
    visit(args_, [&](at::Tensor& t) { tensors.push_back(engine::Recomputation::take(t)); });
    return tensors;
  }
  void operator()(const std::vector<at::Tensor>& tensors) const {
    Fn fn = fn_;
    auto args = args_;
    auto next = tensors.begin();
    visit(args, [&](at::Tensor& t) { t = *next++; });
    std::apply([&](auto&... a) { (void)std::invoke(fn, Keeping<Args>::pass(a)...); }, args);
  }

 private:
  template <class F>
  static void visit(auto& args, F&& f) {
    auto one = [&](auto& a) {
      if constexpr (TensorVisitable<std::remove_reference_t<decltype(a)>>) visit_tensors(a, f);
    };
    std::apply([&](auto&... a) { (one(a), ...); }, args);
  }
  Fn fn_;
  std::tuple<typename Keeping<Args>::Stored...> args_;
};

}  // namespace detail

/// Runs `fn(args…)` and returns its result. What the graph would save of the inside is dropped; backward runs fn again, at the
/// first need and only as far as needed.
///
/// fn and args are copied and kept until the graph is gone: what fn captures by reference must live as long. Arguments: any
/// type; tensors that visit_tensors finds are kept as autograd keeps saved tensors, those in other types are simply held. Inputs
/// that require no gradient, results of any type or none, calls inside a checkpointed function and backward passes over a
/// kept graph all work. Without grad mode nothing is recorded and fn just runs.
///
/// fn must do the same both times. Dropout does (preserve_rng_state); effects besides the result happen twice: BatchNorm's
/// running statistics (Recomputation::running() tells the second run). The second run has the first one's autocast state. A
/// backward pass inside fn keeps the tensors that it saves itself.
///
/// Units called inside fn gather once for forward and once in backward, where the recomputation leaves the parameters for the
/// gradients that follow.
///
/// Throws what fn throws, and what engine::Recomputation does. Backward throws UsageError, naming the first of them, if the
/// second run saves other tensors than the first.
template <class Fn, class... Args>
decltype(auto) checkpoint(const CheckpointOptions& options, Fn&& fn, Args&&... args) {
  if (!c10::GradMode::is_enabled()) return std::invoke(std::forward<Fn>(fn), std::forward<Args>(args)...);
  detail::KeptCall<std::decay_t<Fn>, Args...> again(fn, args...);
  auto tensors = again.take_tensors();
  engine::Recomputation scope(options, tensors, std::move(again));
  return std::invoke(std::forward<Fn>(fn), std::forward<Args>(args)...);
}

/// The same with the default options.
template <class Fn, class... Args>
  requires(!std::is_same_v<std::remove_cvref_t<Fn>, CheckpointOptions>)
decltype(auto) checkpoint(Fn&& fn, Args&&... args) {
  return checkpoint(CheckpointOptions{}, std::forward<Fn>(fn), std::forward<Args>(args)...);
}

}  // namespace fsdpp
