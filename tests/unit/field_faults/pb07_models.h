#pragma once
/// Models of which each rank uses another part.
#include "unit/field_faults/support.h"

namespace fsdpp::test {

struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    e0 = register_parameter("e0", at::ones({4}));
    e1 = register_parameter("e1", at::ones({4}));
  }
  at::Tensor forward(int which) { return (which == 0 ? e0 : e1).sum(); }
  at::Tensor e0, e1;
};
FSDPP_MODULE(Experts);

struct ExpertUnitsImpl : torch::nn::Module {
  ExpertUnitsImpl() {
    e0 = register_module("e0", Sum(at::ones({4})));
    e1 = register_module("e1", Sum(at::ones({4})));
  }
  at::Tensor forward(int which) { return which == 0 ? e0() : e1(); }
  Sum e0{nullptr}, e1{nullptr};
};
FSDPP_MODULE(ExpertUnits);

inline ExpertUnits sharded_experts(const std::shared_ptr<World>& world) {
  auto mesh = Mesh::shard(world);
  ExpertUnits model;
  fully_shard(model->e0, mesh), fully_shard(model->e1, mesh);
  fully_shard(model, mesh);
  return model;
}

}  // namespace fsdpp::test
