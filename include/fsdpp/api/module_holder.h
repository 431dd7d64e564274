#pragma once
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

#include "fsdpp/engine/forward_call.h"
#include "fsdpp/engine/no_cast.h"
#include "fsdpp/engine/visit_tensors.h"

/// Calling modules through their units. C++ modules have no forward hooks and `forward` is not virtual, so the call is ours:
///
///     struct BlockImpl : torch::nn::Module { at::Tensor forward(at::Tensor x); … };
///     FSDPP_MODULE(Block);              // instead of TORCH_MODULE(Block)
///     Block block(…);  block(x);        // pre-forward, BlockImpl::forward, post-forward
///     block->forward(x);                // bypasses the unit, as in Python: an error while the block is sharded
///
/// For modules you don't declare yourself: `fsdpp::Hooked<torch::nn::Linear> head` instead of `torch::nn::Linear head`, or
/// `fsdpp::call(linear, x)` at the call.
///
/// Arguments reach `forward` as they are given, lvalues as the caller's own objects. Only an argument that holds a tensor the
/// unit has to change (cast to param_dtype, move to the GPU) reaches it as a copy; what `forward` writes into that copy is lost.
/// `fsdpp::no_cast(value)` passes any argument untouched.
namespace fsdpp {

namespace detail {

template <class T>
using Plain = std::remove_cvref_t<T>;

// One argument on its way to a forward: the caller's own, or a copy with its tensors cast if one of them has to be.
template <class T>
class Argument {
 public:
  Argument(const engine::ForwardCall& call, T&& value) : value_(&value) {
    if constexpr (kVisits) {
      if (!call.casts_inputs()) return;
      auto& seen = const_cast<Plain<T>&>(value);  // read only
      bool changes = false;
      visit_tensors(seen, [&](at::Tensor& t) { changes = changes || call.changes(t); });
      if (!changes) return;
      visit_tensors(cast_.emplace(std::forward<T>(value)), [&](at::Tensor& t) { call.input(t); });
      value_ = &*cast_;
    }
  }
  [[nodiscard]] T&& get() const { return static_cast<T&&>(*value_); }

 private:
  static constexpr bool kVisits =
      TensorVisitable<Plain<T>> && std::is_copy_constructible_v<Plain<T>> && !std::is_arithmetic_v<Plain<T>>;
  std::remove_reference_t<T>* value_;
  std::conditional_t<kVisits, std::optional<Plain<T>>, std::monostate> cast_;
};

template <class T>
class Argument<NoCast<T>> {
 public:
  Argument(const engine::ForwardCall&, NoCast<T>&& argument) : value_(static_cast<T&&>(argument.value)) {}
  [[nodiscard]] T&& get() const { return static_cast<T&&>(value_); }

 private:
  T&& value_;
};

// What a forward gets for an argument of the call.
template <class T>
struct Given {
  using Type = T&&;
  static T&& from(T&& value) { return static_cast<T&&>(value); }
};
template <class T>
struct Given<NoCast<T>> {
  using Type = T&&;
  static T&& from(NoCast<T>&& argument) { return static_cast<T&&>(argument.value); }
};

}  // namespace detail

/// Runs `function(args…)` as a forward of `module`: for forward methods with another name, or code around several of them.
template <class Function, class... Args>
decltype(auto) call_as(const torch::nn::Module& module, Function&& function, Args&&... args) {
  using Result = std::invoke_result_t<Function, typename detail::Given<Args>::Type...>;
  engine::ForwardCall call(module);
  if (!call.sharded())
    return static_cast<Result>(std::forward<Function>(function)(detail::Given<Args>::from(std::forward<Args>(args))...));
  call.enter();
  if constexpr (std::is_void_v<Result>) {
    std::forward<Function>(function)(detail::Argument<Args>(call, std::forward<Args>(args)).get()...);
    call.leave();
  } else {
    static_assert(TensorVisitable<detail::Plain<Result>>,
                  "fsdpp does not know the tensors in this forward's result: write "
                  "`template <class F> void visit_tensors(YourType& v, F&& f)` in the namespace of the type "
                  "(see fsdpp/engine/visit_tensors.h)");
    detail::Plain<Result> result =
        std::forward<Function>(function)(detail::Argument<Args>(call, std::forward<Args>(args)).get()...);
    visit_tensors(result, [&](at::Tensor& t) { call.output(t); });
    call.leave();
    return static_cast<detail::Plain<Result>>(std::move(result));
  }
}

/// Calls `forward` of a module implementation through its unit.
template <class Impl, class... Args>
  requires std::is_base_of_v<torch::nn::Module, Impl>
auto call(Impl& module, Args&&... args) {
  return call_as(
      module, [&](auto&&... a) { return module.forward(std::forward<decltype(a)>(a)...); }, std::forward<Args>(args)...);
}

/// Calls `forward` of a held module (torch::nn::Linear, …) through its unit.
template <class Impl, class... Args>
auto call(const torch::nn::ModuleHolder<Impl>& holder, Args&&... args) {
  return call(*holder.ptr(), std::forward<Args>(args)...);
}

/// torch::nn::ModuleHolder whose call operator goes through the unit.
template <class Impl>
class ModuleHolder : public torch::nn::ModuleHolder<Impl> {
 public:
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  template <class... Args>
  auto operator()(Args&&... args) {
    return fsdpp::call(*this->ptr(), std::forward<Args>(args)...);
  }
};

/// A holder for a module declared elsewhere: Hooked<torch::nn::Linear>.
template <class Holder>
class Hooked : public ModuleHolder<typename Holder::ContainedType> {
 public:
  using ModuleHolder<typename Holder::ContainedType>::ModuleHolder;
  Hooked(const Holder& holder) : ModuleHolder<typename Holder::ContainedType>(holder.ptr()) {}  // NOLINT: a holder is a holder
};

}  // namespace fsdpp

/// Declares `Name`, a holder of `NameImpl` whose call goes through its unit.
#define FSDPP_MODULE(Name)                                  \
  class Name : public fsdpp::ModuleHolder<Name##Impl> {     \
   public:                                                  \
    using fsdpp::ModuleHolder<Name##Impl>::ModuleHolder;    \
    using Impl [[maybe_unused]] = Name##Impl;               \
  }
