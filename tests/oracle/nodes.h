#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdpp/api/module_holder.h"

/// A small interpreter of models: the vocabulary of generate.py, each word a module. nodes.py is its twin in Python.
namespace fsdpp::test::oracle {

/// One module of a model: takes and gives one tensor.
struct NodeImpl : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};
FSDPP_MODULE(Node);

struct Model {
  Node root{nullptr};
  std::map<std::string, Node> nodes;  ///< by path, e.g. "2.0.1"; the root is ""
};

/// Parameters in order of registration, each once, under its first name.
[[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(const torch::nn::Module& module);

/// Builds the model of a case for one rank (a gate asks for the rank) and gives its parameters their values.
[[nodiscard]] Model make_model(const nlohmann::json& c, int rank);

}  // namespace fsdpp::test::oracle
