#include "oracle/nodes.h"

#include <ATen/ops/add.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <unordered_set>

#include "oracle/numbers.h"

namespace fsdpp::test::oracle {
namespace {

using nlohmann::json;
using Shape = std::vector<int64_t>;

/// What building needs to know beside the node itself.
struct Build {
  const json& c;
  int rank;
  at::ScalarType dtype;
  Model& model;
};

at::Tensor to_dtype_of(const at::Tensor& x, const at::Tensor& like) { return x.to(like.scalar_type()); }

// A module with parameters of its own and a function of them.
struct LeafImpl : NodeImpl {
  using Function = std::function<at::Tensor(LeafImpl&, const at::Tensor&)>;
  at::Tensor add(const std::string& name, Shape shape, at::ScalarType dtype) {
    return register_parameter(name, at::empty(shape, dtype));
  }
  at::Tensor forward(const at::Tensor& x) override { return function(*this, x); }
  at::Tensor weight, bias;
  Function function;
};

// Children called one after the other, each `repeats` times, and the input added to what comes out if `residual`.
struct SequenceImpl : NodeImpl {
  at::Tensor forward(const at::Tensor& x) override {
    auto y = x;
    for (auto& child : children)
      for (int i = 0; i < repeats; ++i) y = child(y);
    return residual ? at::add(x, y) : y;
  }
  std::vector<Node> children;
  int repeats = 1;
  bool residual = false;
};

// Children that nobody calls.
struct UnusedImpl : NodeImpl {
  at::Tensor forward(const at::Tensor& x) override { return x; }
};

at::Tensor linear(LeafImpl& m, const at::Tensor& x) { return at::linear(to_dtype_of(x, m.weight), m.weight, m.bias); }
at::Tensor transposed(LeafImpl& m, const at::Tensor& x) { return at::matmul(to_dtype_of(x, m.weight), m.weight); }
at::Tensor embedding(LeafImpl& m, const at::Tensor& x) { return at::embedding(m.weight, x); }
at::Tensor layer_norm(LeafImpl& m, const at::Tensor& x) {
  return at::layer_norm(to_dtype_of(x, m.weight), {x.size(-1)}, m.weight, m.bias, 0.1);
}
at::Tensor rms_norm(LeafImpl& m, const at::Tensor& x) { return at::rms_norm(to_dtype_of(x, m.weight), {x.size(-1)}, m.weight, 0.1); }
at::Tensor times(LeafImpl& m, const at::Tensor& x) { return at::mul(x, m.weight); }
at::Tensor plus(LeafImpl& m, const at::Tensor& x) { return at::add(x, m.weight); }
at::Tensor pair(LeafImpl& m, const at::Tensor& x) { return x * m.weight.select(0, 0) + m.weight.select(0, 1); }
at::Tensor plus_sum(LeafImpl& m, const at::Tensor& x) { return x + m.weight.sum().to(x.scalar_type()); }
at::Tensor times_mean(LeafImpl& m, const at::Tensor& x) { return x * m.weight.mean().to(x.scalar_type()); }
at::Tensor plus_mean(LeafImpl& m, const at::Tensor& x) { return x + m.weight.mean(at::IntArrayRef({0, 1})); }
at::Tensor same(LeafImpl&, const at::Tensor& x) { return x; }

at::Tensor activate(const std::string& name, const at::Tensor& x) {
  if (name == "tanh") return at::tanh(x);
  return name == "gelu" ? at::gelu(x) : at::silu(x);
}

std::shared_ptr<LeafImpl> make_matrix(const json& node, const Build& b) {
  auto m = std::make_shared<LeafImpl>();
  std::string kind = node.at("kind");
  int64_t in = node.at("in"), out = node.at("out");
  if (kind == "transposed") {
    m->weight = m->register_parameter("weight", at::empty({out, in}, b.dtype).t());
    m->function = transposed;
    return m;
  }
  m->weight = m->add("weight", {out, in}, b.dtype);
  if (node.at("bias").get<bool>()) m->bias = m->add("bias", {out}, b.dtype);
  m->function = linear;
  return m;
}

std::shared_ptr<LeafImpl> make_tied(const json& node, const Build& b) {
  auto m = std::make_shared<LeafImpl>();
  std::string owner = node.at("to");
  m->weight = m->register_parameter("weight", dynamic_cast<LeafImpl&>(*b.model.nodes.at(owner)).weight);
  m->function = linear;
  return m;
}

std::shared_ptr<LeafImpl> make_norm(const json& node, const Build& b) {
  auto m = std::make_shared<LeafImpl>();
  int64_t dim = node.at("dim");
  m->weight = m->add("weight", {dim}, b.dtype);
  bool layer = node.at("kind") == "layernorm";
  if (layer) m->bias = m->add("bias", {dim}, b.dtype);
  m->function = layer ? layer_norm : rms_norm;
  return m;
}

std::shared_ptr<LeafImpl> make_vector(const json& node, const Build& b) {
  auto m = std::make_shared<LeafImpl>();
  std::string kind = node.at("kind");
  auto dtype = kind == "wide" ? at::kDouble : b.dtype;
  if (kind == "buffer") {
    m->weight = m->register_buffer("weight", at::empty(node.at("shape").get<Shape>(), b.dtype));
  } else {
    m->weight = m->add("weight", node.at("shape").get<Shape>(), dtype);
  }
  static const std::map<std::string, LeafImpl::Function> functions{
      {"embedding", embedding}, {"scalar", times}, {"pair", pair}, {"wide", times_mean}, {"empty", plus_sum}, {"buffer", plus}, {"cube", plus_mean}};
  if (kind != "gate") {
    m->function = functions.at(kind);
    return m;
  }
  auto users = node.at("used_by").get<std::vector<int>>();
  bool used = std::find(users.begin(), users.end(), b.rank) != users.end();
  m->function = used ? times : same;
  return m;
}

std::shared_ptr<NodeImpl> make_leaf(const json& node, const Build& b) {
  std::string kind = node.at("kind");
  if (kind == "linear" || kind == "transposed") return make_matrix(node, b);
  if (kind == "tied") return make_tied(node, b);
  if (kind == "layernorm" || kind == "rmsnorm") return make_norm(node, b);
  if (kind != "act") return make_vector(node, b);
  auto m = std::make_shared<LeafImpl>();
  m->function = [name = node.at("name").get<std::string>()](LeafImpl&, const at::Tensor& x) { return activate(name, x); };
  return m;
}

Node make_node(const json& node, const std::string& path, const Build& b);

std::vector<Node> make_children(const json& node, const std::string& path, NodeImpl& parent, const Build& b) {
  std::vector<Node> children;
  for (size_t i = 0; i < node.at("children").size(); ++i) {
    auto name = std::to_string(i);
    children.push_back(make_node(node.at("children")[i], path.empty() ? name : path + "." + name, b));
    parent.register_module(name, children.back());
  }
  return children;
}

std::shared_ptr<NodeImpl> make_container(const json& node, const std::string& path, const Build& b) {
  std::string kind = node.at("kind");
  if (kind == "unused") {
    auto m = std::make_shared<UnusedImpl>();
    (void)make_children(node, path, *m, b);
    return m;
  }
  auto m = std::make_shared<SequenceImpl>();
  m->children = make_children(node, path, *m, b);
  m->repeats = kind == "twice" ? 2 : 1;
  m->residual = kind == "residual";
  return m;
}

Node make_node(const json& node, const std::string& path, const Build& b) {
  Node made(node.contains("children") ? make_container(node, path, b) : make_leaf(node, b));
  for (auto& name : node.value("frozen", std::vector<std::string>{})) made->named_parameters(false)[name].requires_grad_(false);
  b.model.nodes.emplace(path, made);
  return made;
}

// Matrices so that activations keep their size; what multiplies near 1; what is added near 0.
void fill_parameter(const at::Tensor& p, const std::string& name, uint64_t seed, uint64_t stream) {
  bool adds = name.ends_with("bias");
  if (p.dim() >= 2)
    fill(p, seed, stream, 0.0, 1.5 / std::sqrt(static_cast<double>(std::max<int64_t>(1, p.size(-1)))));
  else
    fill(p, seed, stream, adds ? 0.0 : 1.0, 0.3);
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (auto& p : module.named_parameters(true))
    if (seen.insert(p.value().unsafeGetTensorImpl()).second) result.emplace_back(p.key(), p.value());
  return result;
}

Model make_model(const json& c, int rank) {
  Model model;
  auto dtype = c.at("dtype") == "float64" ? at::kDouble : at::kFloat;
  model.root = make_node(c.at("model"), "", {c, rank, dtype, model});
  uint64_t seed = c.at("numbers"), stream = 0;
  for (auto& [name, p] : distinct_parameters(*model.root)) fill_parameter(p, name, seed, stream++);
  for (auto& b : model.root->named_buffers(true)) fill(b.value(), seed, stream++, 0.0, 0.3);
  return model;
}

}  // namespace fsdpp::test::oracle
