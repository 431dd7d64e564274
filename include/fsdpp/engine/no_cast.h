#pragma once
#include <utility>

namespace fsdpp {

/// An argument that its unit leaves alone; made by no_cast, for the call it is written in.
template <class T>
struct NoCast {
  T&& value;
};

/// Keeps an argument of a module's call out of the casts of its unit (MixedPrecisionPolicy::cast_forward_inputs) and on its
/// device: `block(x, no_cast(angles))`. `forward` gets the value itself, also where no unit is involved.
template <class T>
[[nodiscard]] NoCast<T> no_cast(T&& value) {
  return {std::forward<T>(value)};
}

}  // namespace fsdpp
