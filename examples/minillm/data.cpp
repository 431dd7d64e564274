#include "data.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "fsdpp/base/error.h"
#include "fsdpp/trace/scope.h"

namespace minillm {
namespace {

constexpr size_t kAhead = 3;  // micro-batches prepared ahead

std::span<int64_t> elements(const at::Tensor& t) { return {t.data_ptr<int64_t>(), static_cast<size_t>(t.numel())}; }

}  // namespace

/// Shared by the thread and next(). The thread ends when everything is prepared, when it failed, or when `stop` is set.
struct Loader::Queue {
  std::unique_ptr<BatchSource> source;
  BatchShape shape;
  int64_t count = 0;
  bool pinned = false;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Batch> ready;      // guarded by mutex, as all below
  std::exception_ptr failure;
  bool stop = false, done = false;
  std::thread thread;

  Batch prepare(int64_t m) const {
    const fsdpp::trace::Scope scope(fsdpp::trace::Kind::Loader, "prepare micro-batch");
    const auto options = at::TensorOptions().dtype(at::kLong).pinned_memory(pinned);
    Batch batch{at::empty({shape.batch, shape.seq}, options), at::empty({shape.batch, shape.seq}, options)};
    source->fill(m, elements(batch.inputs), elements(batch.targets));
    return batch;
  }

  /// False when the thread should end.
  bool push(Batch batch) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return stop || ready.size() < kAhead; });
    if (stop) return false;
    ready.push_back(std::move(batch));
    changed.notify_all();
    return true;
  }

  void run(c10::Device device) noexcept {
    std::exception_ptr error;
    try {
      std::optional<c10::DeviceGuard> guard;  // pinned memory belongs to this rank's device
      if (pinned) guard.emplace(device);
      for (int64_t m = 0; m < count; ++m)
        if (!push(prepare(m))) break;
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    failure = error;
    done = true;
    changed.notify_all();
  }
};

Loader::Loader(std::unique_ptr<BatchSource> source, BatchShape shape, int64_t count, c10::Device device)
    : queue_(std::make_unique<Queue>()), device_(device) {
  queue_->source = std::move(source);
  queue_->shape = shape;
  queue_->count = count;
  queue_->pinned = device.is_cuda();
  queue_->thread = std::thread([queue = queue_.get(), device] { queue->run(device); });
}

Loader::~Loader() {
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->stop = true;
    queue_->changed.notify_all();
  }
  queue_->thread.join();
}

Batch Loader::next() {
  const fsdpp::trace::Scope scope(fsdpp::trace::Kind::Loader, "next micro-batch");
  Batch batch;
  {
    std::unique_lock lock(queue_->mutex);
    queue_->changed.wait(lock, [&] { return queue_->done || !queue_->ready.empty(); });
    if (queue_->ready.empty()) {
      if (queue_->failure) std::rethrow_exception(queue_->failure);
      throw fsdpp::UsageError("Loader::next: all micro-batches have been taken");
    }
    batch = std::move(queue_->ready.front());
    queue_->ready.pop_front();
    queue_->changed.notify_all();
  }
  if (device_.is_cpu()) return batch;
  return {batch.inputs.to(device_, /*non_blocking=*/true), batch.targets.to(device_, /*non_blocking=*/true)};
}

}  // namespace minillm
