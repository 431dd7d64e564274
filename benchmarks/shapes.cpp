#include "shapes.h"

#include "fsdpp/base/error.h"

namespace bench {

void use_shape(minillm::Options& o, const std::string& name) {
  const auto set = [&](const minillm::ModelConfig& model, int64_t batch, int64_t seq) {
    o.model = model;
    o.batch = batch;
    o.seq = seq;
  };
  if (name == "seed") return set({}, 8, 1024);
  if (name == "half") return set({.dim = 1024}, 4, 512);
  if (name == "launch") return set({.vocab = 1024, .dim = 256, .layers = 24, .heads = 8}, 1, 64);
  if (name == "small") return set({.vocab = 1000, .dim = 128, .layers = 6, .heads = 4}, 2, 256);
  if (name == "tiny") return set({.vocab = 64, .dim = 32, .layers = 3, .heads = 2}, 2, 8);
  throw fsdpp::ConfigError("shape '" + name + "': expected seed, half, launch, small or tiny");
}

}  // namespace bench
