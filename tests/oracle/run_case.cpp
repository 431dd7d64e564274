#include "oracle/run_case.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mse_loss.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <optional>

#include "fsdpp/api/fully_shard.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip_grad_norm.h"
#include "oracle/nodes.h"
#include "oracle/numbers.h"
#include "support/event_log.h"

namespace fsdpp::test::oracle {
namespace {

using nlohmann::json;
using Wire = std::vector<std::map<std::string, int64_t>>;  // by rank

std::optional<at::ScalarType> dtype_of(const json& name) {
  if (name.is_null()) return std::nullopt;
  static const std::map<std::string, at::ScalarType> names{
      {"float16", at::kHalf}, {"bfloat16", at::kBFloat16}, {"float32", at::kFloat}, {"float64", at::kDouble}};
  return names.at(name.get<std::string>());
}

FullyShardOptions options_of(const json& unit, const Model& model) {
  FullyShardOptions options;
  auto& policy = unit.at("policy");
  options.mp_policy = {dtype_of(policy.at("param")), dtype_of(policy.at("reduce")), dtype_of(policy.at("output")), policy.at("cast_inputs")};
  auto& reshard = unit.at("reshard");
  if (reshard.is_boolean()) options.reshard_after_forward = reshard.get<bool>();
  if (reshard.is_number()) options.reshard_after_forward = reshard.get<int>();
  auto parameters = model.root->named_parameters(true);
  for (auto& name : unit.at("ignored")) options.ignored_params.push_back(parameters[name.get<std::string>()]);
  return options;
}

std::vector<UnitHandle> shard_model(const json& c, const Model& model, const std::shared_ptr<comm::World>& world) {
  int replicate = c.at("replicate");
  auto mesh = replicate == 0 ? comm::Mesh::shard(world) : comm::Mesh::hybrid(world, replicate);
  std::vector<UnitHandle> units;
  for (auto& unit : c.at("units")) {
    std::vector<std::shared_ptr<torch::nn::Module>> modules;
    for (auto& path : unit.at("modules")) modules.push_back(model.nodes.at(path.get<std::string>()).ptr());
    units.push_back(fully_shard(modules, mesh, options_of(unit, model)));
  }
  auto pick = [&](const json& ids) {
    std::vector<UnitHandle> picked;
    for (auto& id : ids) picked.push_back(units[id.get<size_t>()]);
    return picked;
  };
  for (auto& [id, ids] : c.at("prefetch_forward").items()) units[std::stoul(id)].set_modules_to_forward_prefetch(pick(ids));
  for (auto& [id, ids] : c.at("prefetch_backward").items()) units[std::stoul(id)].set_modules_to_backward_prefetch(pick(ids));
  if (c.at("reduce_unused").get<bool>()) units.back().set_reduce_scatter_unused_params(true);
  if (c.at("reshard_after_backward") == "never") units.back().set_reshard_after_backward(false);
  return units;
}

struct Optimizer {
  std::function<void()> step;
  std::function<void(bool)> zero_grad;
};

template <class T>
Optimizer hold(std::shared_ptr<T> optimizer) {
  return {[=] { optimizer->step(); }, [=](bool set_to_none) { optimizer->zero_grad(set_to_none); }};
}

Optimizer make_optimizer(const json& o, const torch::nn::Module& model) {
  double lr = o.at("lr"), decay = o.at("weight_decay");
  std::vector<at::Tensor> parameters;
  for (auto& [name, p] : distinct_parameters(model)) parameters.push_back(p);
  if (o.at("kind") == "sgd")
    return hold(std::make_shared<torch::optim::SGD>(parameters, torch::optim::SGDOptions(lr).momentum(o.at("momentum")).weight_decay(decay)));
  double eps = o.at("eps");
  if (o.at("kind") == "adamw")
    return hold(std::make_shared<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(lr).eps(eps).weight_decay(decay)));
  return hold(std::make_shared<optim::AdamW>(model, optim::AdamWOptions{.lr = lr, .eps = eps, .weight_decay = decay}));
}

// The program of one rank.
class Rank {
 public:
  Rank(const json& c, std::shared_ptr<comm::World> world, bool sharded, Wire& wire)
      : c_(c), rank_(world->rank()), micro_(c.at("micro")), wire_(wire), model_(make_model(c, rank_)) {
    if (sharded) units_ = shard_model(c, model_, world);
  }

  RankResult train() {
    auto optimizer = make_optimizer(c_.at("optimizer"), *model_.root);
    int steps = c_.at("steps");
    for (int s = 0; s < steps; ++s) {
      optimizer.zero_grad(c_.at("set_to_none"));
      for (int k = 0; k < micro_; ++k) micro_step(s, k);
      result_.norms.push_back(clip());
      optimizer.step();
    }
    for (auto& u : units_) result_.stats.push_back(u.stats());
    result_.wire = wire_[static_cast<size_t>(rank_)];
    {
      at::NoGradGuard no_grad;
      result_.final_loss = loss(steps, 0).item<double>();
    }
    for (auto& [name, p] : distinct_parameters(*model_.root)) result_.weights.emplace_back(name, full(p));
    return std::move(result_);
  }

 private:
  void set_modes(int k) {
    if (units_.empty()) return;
    auto& root = units_.back();
    bool last = k + 1 == micro_;
    if (c_.at("mode") == "sync_last") root.set_requires_gradient_sync(last);
    if (c_.at("mode") == "all_reduce_last") root.set_requires_all_reduce(last);
    if (c_.at("reshard_after_backward") == "last") root.set_reshard_after_backward(last);
    if (c_.at("is_last").get<bool>()) root.set_is_last_backward(last);
  }

  void micro_step(int step, int k) {
    set_modes(k);
    auto value = loss(step, k);
    (value / micro_).backward();
    result_.losses.push_back(value.item<double>());
  }

  at::Tensor loss(int step, int k) {
    uint64_t seed = c_.at("numbers"), stream = 10000 + 2 * static_cast<uint64_t>((step * 16 + k) * 16 + rank_);
    int64_t batch = c_.at("batch"), length = c_.at("length"), vocab = c_.at("vocab");
    auto dtype = c_.at("dtype") == "float64" ? at::kDouble : at::kFloat;
    if (vocab > 0) {
      auto out = model_.root(random_ids({batch, length}, seed, stream, vocab));
      return at::cross_entropy_loss(out.reshape({-1, vocab}).to(dtype), random_ids({batch * length}, seed, stream + 1, vocab));
    }
    auto x = at::empty({batch, c_.at("dim").get<int64_t>()}, dtype), target = at::empty({batch, c_.at("out").get<int64_t>()}, dtype);
    fill(x, seed, stream, 0.0, 1.0);
    fill(target, seed, stream + 1, 0.0, 1.0);
    return at::mse_loss(model_.root(x).to(dtype), target);
  }

  double clip() const {
    auto& clip = c_.at("clip");
    if (clip.is_null()) return optim::grad_norm(*model_.root);
    double p = clip.at("p").is_string() ? std::numeric_limits<double>::infinity() : clip.at("p").get<double>();
    return optim::clip_grad_norm_(*model_.root, clip.at("max"), p);
  }

  at::Tensor full(const at::Tensor& p) const {
    auto managed = [&](const UnitHandle& u) {
      for (auto& s : u.parameters())
        if (s.handle.is_same(p)) return true;
      return false;
    };
    for (auto& u : units_)
      if (managed(u)) return full_tensor(p);
    return p.detach().clone();
  }

  const json& c_;
  int rank_, micro_;
  Wire& wire_;
  Model model_;
  std::vector<UnitHandle> units_;
  RankResult result_;
};

}  // namespace

std::vector<RankResult> run_case(const json& c, bool sharded) {
  auto ranks = c.at("ranks").get<size_t>();
  std::vector<RankResult> results(ranks);
  Wire wire(ranks);
  comm::LocalWorldOptions options;
  options.on_operation = [&](const comm::OperationEvent& e) {
    if (!EventLog::is_check(e.label) && e.label != "grad_norm") ++wire[static_cast<size_t>(e.rank)][e.op];
    return comm::Fault::None;
  };
  comm::run_local_world(
      static_cast<int>(ranks),
      [&](std::shared_ptr<comm::World> world) {
        auto rank = static_cast<size_t>(world->rank());
        results[rank] = Rank(c, world, sharded, wire).train();
      },
      options);
  return results;
}

}  // namespace fsdpp::test::oracle
