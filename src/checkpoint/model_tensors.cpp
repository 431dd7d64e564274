#include "checkpoint/model_tensors.h"

#include <unordered_map>

#include "base/enforce.h"
#include "fsdpp/api/unit_handle.h"

namespace fsdpp::dcp {
namespace {

class Collector {
 public:
  void add_sharded(std::vector<shard::ShardedParam> params) {
    for (auto& p : params) {
      if (!result.mesh) result.mesh = p.mesh;
      FSDPP_ENFORCE(p.mesh == result.mesh, CheckpointError, "parameter '{}' lies on mesh '{}', others on '{}'; save and load need one mesh",
                    p.name, p.mesh->name(), result.mesh->name());
      sharded_.emplace(p.handle.unsafeGetTensorImpl(), std::move(p));
    }
  }

  void add(const torch::OrderedDict<std::string, at::Tensor>& named) {
    for (const auto& item : named) {
      const auto& tensor = item.value();
      if (!tensor.defined()) continue;
      auto* key = tensor.unsafeGetTensorImpl();
      const auto [place, fresh] = seen_.emplace(key, result.items.size());
      if (fresh) result.items.push_back({{}, tensor, std::nullopt});
      auto& entry = result.items[place->second];
      entry.names.push_back(item.key());
      if (const auto found = sharded_.find(key); fresh && found != sharded_.end()) entry.sharded = found->second;
    }
  }

  ModelTensors result;

 private:
  std::unordered_map<const c10::TensorImpl*, shard::ShardedParam> sharded_;
  std::unordered_map<const c10::TensorImpl*, size_t> seen_;
};

}  // namespace

ModelTensors collect_tensors(const torch::nn::Module& model) {
  for (const auto& unit : units(model))
    if (!unit.is_sharded()) unit.reshard();
  Collector collector;
  collector.add_sharded(sharded_parameters(model));
  collector.add(model.named_parameters());
  collector.add(model.named_buffers());
  return std::move(collector.result);
}

}  // namespace fsdpp::dcp
