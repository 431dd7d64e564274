#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

/// Finding the tensors in a module's arguments and results.
///
/// `visit_tensors(value, f)` calls f(at::Tensor&) for each tensor inside `value`: a tensor, an optional, pair, tuple, array,
/// vector, map or variant of such, nested at will. For a struct of your own write one overload in its namespace:
///
///     struct Output { at::Tensor logits, loss; int64_t tokens; };
///     template <class F> void visit_tensors(Output& o, F&& f) { f(o.logits); f(o.loss); }
namespace fsdpp {

template <class F>
void visit_tensors(at::Tensor& t, F&& f) {
  f(t);
}
template <class T, class F>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T>
void visit_tensors(T&, F&&) {}
template <class F>
void visit_tensors(std::string&, F&&) {}
template <class F>
void visit_tensors(std::monostate&, F&&) {}

template <class T, class F> void visit_tensors(std::optional<T>& v, F&& f);
template <class A, class B, class F> void visit_tensors(std::pair<A, B>& v, F&& f);
template <class... T, class F> void visit_tensors(std::tuple<T...>& v, F&& f);
template <class T, size_t N, class F> void visit_tensors(std::array<T, N>& v, F&& f);
template <class T, class A, class F> void visit_tensors(std::vector<T, A>& v, F&& f);
template <class K, class V, class C, class A, class F> void visit_tensors(std::map<K, V, C, A>& v, F&& f);
template <class K, class V, class H, class E, class A, class F> void visit_tensors(std::unordered_map<K, V, H, E, A>& v, F&& f);
template <class... T, class F> void visit_tensors(std::variant<T...>& v, F&& f);

template <class T, class F>
void visit_tensors(std::optional<T>& v, F&& f) {
  if (v) visit_tensors(*v, f);
}
template <class A, class B, class F>
void visit_tensors(std::pair<A, B>& v, F&& f) {
  visit_tensors(v.first, f);
  visit_tensors(v.second, f);
}
template <class... T, class F>
void visit_tensors(std::tuple<T...>& v, F&& f) {
  std::apply([&](auto&... e) { (visit_tensors(e, f), ...); }, v);
}
template <class T, size_t N, class F>
void visit_tensors(std::array<T, N>& v, F&& f) {
  for (auto& e : v) visit_tensors(e, f);
}
template <class T, class A, class F>
void visit_tensors(std::vector<T, A>& v, F&& f) {
  if constexpr (!std::is_arithmetic_v<T>)
    for (auto& e : v) visit_tensors(e, f);
}
template <class K, class V, class C, class A, class F>
void visit_tensors(std::map<K, V, C, A>& v, F&& f) {
  for (auto& e : v) visit_tensors(e.second, f);
}
template <class K, class V, class H, class E, class A, class F>
void visit_tensors(std::unordered_map<K, V, H, E, A>& v, F&& f) {
  for (auto& e : v) visit_tensors(e.second, f);
}
template <class... T, class F>
void visit_tensors(std::variant<T...>& v, F&& f) {
  std::visit([&](auto& e) { visit_tensors(e, f); }, v);
}

namespace detail {
struct IgnoreTensor {
  void operator()(at::Tensor&) const {}
};
}  // namespace detail

/// True for types whose tensors visit_tensors can find.
template <class T>
concept TensorVisitable = requires(T& value) { visit_tensors(value, detail::IgnoreTensor{}); };

}  // namespace fsdpp
