#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/model_params.h"

/// Sums over the gradients of a model, wherever they live.
namespace fsdpp::optim {

/// Gradients that are joined over the same ranks: those of one mesh, or (no mesh) the unsharded ones.
struct GradGroup {
  comm::Mesh* mesh = nullptr;
  c10::Device home = c10::kCPU;   ///< the mesh's device, or that of the first gradient
  std::vector<at::Tensor> grads;  ///< this rank's; on `home` or anywhere else
};

/// The meshes in the same order on every rank, with or without gradients on this one; the unsharded ones last.
/// `who` is the calling function, for messages.
[[nodiscard]] std::vector<GradGroup> group_gradients(const char* who, const ModelParams& params);

/// (Σ|g|^p)^(1/p), or max|g| for p = ∞, over all gradients of all ranks; those that replicas share, and the unsharded
/// ones, count once. Collective: one all-reduce of one number for each mesh of more than one shard.
[[nodiscard]] double global_norm(const std::vector<GradGroup>& groups, double p);
/// The same as one fp64 element in the memory of the first group's home, without waiting for it.
[[nodiscard]] at::Tensor global_norm_on_device(const std::vector<GradGroup>& groups, double p);

/// Whether all gradients are finite on all ranks. Collective: for each mesh, one all-reduce of one number among its
/// shards and one among its replicas.
[[nodiscard]] bool all_finite(const std::vector<GradGroup>& groups);

/// g *= coefficient. 1 touches nothing. Local.
void scale_all(const std::vector<GradGroup>& groups, double coefficient);
/// By one fp64 element.
void scale_all(const std::vector<GradGroup>& groups, const at::Tensor& coefficient);

}  // namespace fsdpp::optim
