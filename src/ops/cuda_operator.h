#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <type_traits>

/// Operators of LibTorch's dispatcher, of namespace `fsdpp`: calls that go through it are seen by the use guard and by
/// profilers.
namespace fsdpp::ops {

/// Registers `function` as the CUDA implementation of an operator without a derivative. Once for each function: keep
/// the handle.
template <auto* function>
[[nodiscard]] auto register_cuda_operator(const std::string& name, const std::string& arguments) {
  static torch::Library library(torch::Library::FRAGMENT, "fsdpp", std::nullopt, __FILE__, __LINE__);
  library.def((name + arguments).c_str());
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(*function)));
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("fsdpp::" + name).c_str(), "")
      .typed<std::remove_pointer_t<decltype(function)>>();
}

}  // namespace fsdpp::ops
