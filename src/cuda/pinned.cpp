#include "fsdpp/cuda/pinned.h"

#include <cstdlib>
#include <new>

#include "fsdpp/cuda/stream.h"
#if FSDPP_CUDA
#include "cuda/check.h"
#endif

namespace fsdpp::cuda {
namespace {

constexpr size_t kAlign = 64;

void* plain_alloc(size_t bytes) { return ::operator new(bytes, std::align_val_t(kAlign)); }
void plain_free(void* data) noexcept { ::operator delete(data, std::align_val_t(kAlign)); }

}  // namespace

PinnedBuffer::PinnedBuffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
#if FSDPP_CUDA
  if (available()) {
    FSDPP_CUDA_CHECK(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable));
    pinned_ = true;
    return;
  }
#endif
  data_ = plain_alloc(bytes);
}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(pinned_, other.pinned_);
  return *this;
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ == nullptr) return;
#if FSDPP_CUDA
  if (pinned_) {
    ignore(cudaFreeHost(data_));
    return;
  }
#endif
  plain_free(data_);
}

}  // namespace fsdpp::cuda
