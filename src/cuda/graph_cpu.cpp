// The build without CUDA: there are no graphs.
#include "base/enforce.h"
#include "fsdpp/cuda/graph.h"

namespace fsdpp::cuda {

struct Graph::Impl {};

Graph::Graph(c10::Device device) {
  fail<CudaError>("cuda::Graph: expected a build with CUDA for device {}. Try: configure with -DFSDPP_WITH_CUDA=ON.", device.str());
}
Graph::~Graph() = default;
void Graph::capture(const std::function<void()>&) {}
void Graph::replay() {}
bool Graph::captured() const noexcept { return false; }
StreamView Graph::stream() const noexcept { return {}; }
Graph* Graph::capturing() noexcept { return nullptr; }
void Graph::before_replay(std::function<void()>) {}

}  // namespace fsdpp::cuda
