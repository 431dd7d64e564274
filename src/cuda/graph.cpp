#include "fsdpp/cuda/graph.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <exception>
#include <memory>
#include <vector>

#include "cuda/capture.h"
#include "cuda/check.h"

namespace fsdpp::cuda {
namespace {

std::atomic<Graph*>& current() {
  static std::atomic<Graph*> instance{nullptr};
  return instance;
}

std::atomic<uint64_t>& capture_number() {
  static std::atomic<uint64_t> instance{0};
  return instance;
}

}  // namespace

uint64_t running_capture() { return Graph::capturing() != nullptr ? capture_number().load(std::memory_order_acquire) : 0; }
uint64_t capture_of(StreamView stream) { return Graph::capturing() != nullptr && stream.is_capturing() ? running_capture() : 0; }

struct Graph::Impl {
  explicit Impl(c10::DeviceIndex index) : stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, index)) {}
  // LibTorch's allocator and random generator are left in the middle of a capture that failed: takes them out of it.
  void clean_up(at::cuda::MempoolId_t pool) {
    quietly([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(stream.device_index(), pool); });  // ended already: refused
    graph.reset();
    quietly([&] {
      at::cuda::CUDAGraph nothing;
      nothing.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      nothing.capture_end();
    });
    ignore(cudaGetLastError());
    updates.clear();
  }
  template <class F>
  static void quietly(F f) {
    try {
      f();
    } catch (const std::exception&) {
    }
  }
  c10::cuda::CUDAStream stream;
  std::unique_ptr<at::cuda::CUDAGraph> graph;
  std::vector<std::function<void()>> updates;
  bool captured = false;
};

Graph::Graph(c10::Device device) {
  FSDPP_ENFORCE(device.is_cuda(), CudaError, "cuda::Graph: expected a CUDA device, got {}", device.str());
  impl_ = std::make_unique<Impl>(device.has_index() ? device.index() : c10::cuda::current_device());
}

Graph::~Graph() = default;

Graph* Graph::capturing() noexcept { return current().load(std::memory_order_acquire); }
bool Graph::captured() const noexcept { return impl_->captured; }
StreamView Graph::stream() const noexcept { return {impl_->stream.stream(), impl_->stream.device_index()}; }
void Graph::before_replay(std::function<void()> update) { impl_->updates.push_back(std::move(update)); }

void Graph::capture(const std::function<void()>& work) {
  FSDPP_ENFORCE(!impl_->captured, UsageError, "cuda::Graph: expected an empty graph, got one that is captured already");
  c10::cuda::CUDAStreamGuard guard(impl_->stream);
  FSDPP_CUDA_CHECK(cudaDeviceSynchronize());
  c10::cuda::CUDACachingAllocator::emptyCache();  // what eager runs left free: the graph's pool can't use it
  Graph* none = nullptr;
  FSDPP_ENFORCE(current().compare_exchange_strong(none, this), UsageError, "cuda::Graph: another graph is being captured in this process. Try: one after the other");
  capture_number().fetch_add(1, std::memory_order_acq_rel);
  std::exception_ptr failure;
  const auto pool = at::cuda::graph_pool_handle();
  impl_->graph = std::make_unique<at::cuda::CUDAGraph>();
  try {
    // Other threads (loaders, watchdogs) go on with calls that a capture of this thread alone does not mind.
    impl_->graph->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    impl_->graph->capture_end();
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  current().store(nullptr, std::memory_order_release);
  ignore(cudaGetLastError());
  impl_->captured = !failure;
  if (!failure) return;
  impl_->clean_up(pool);
  std::rethrow_exception(failure);
}

void Graph::replay() {
  FSDPP_ENFORCE(impl_->captured, UsageError, "cuda::Graph: expected a captured graph, got an empty one");
  for (auto& update : impl_->updates) update();
  impl_->graph->replay();
}

}  // namespace fsdpp::cuda
