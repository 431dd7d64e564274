#pragma once
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdpp::optim::test {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

/// A module with just these parameters.
class Bag : public torch::nn::Module {
 public:
  explicit Bag(const Named& params) {
    for (const auto& [name, value] : params)
      register_parameter(name, value.detach().clone(), value.is_floating_point());
  }
  explicit Bag(const Named& params, const std::shared_ptr<Bag>& child) : Bag(params) {
    register_module("child", child);
  }
  at::Tensor operator[](const std::string& name) const { return named_parameters(/*recurse=*/false)[name]; }
};

inline std::shared_ptr<Bag> bag(const Named& params) { return std::make_shared<Bag>(params); }

}  // namespace fsdpp::optim::test
