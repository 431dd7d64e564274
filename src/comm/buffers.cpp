#include "fsdpp/comm/buffers.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <numeric>

namespace fsdpp::comm {

at::Tensor allocate_tensor(Communicator& comm, at::IntArrayRef sizes, c10::ScalarType dtype, std::string_view label) {
  const int64_t numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  Allocation memory = comm.allocate(bytes, {.label = label});
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(bytes), std::move(memory.data),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::empty({0}, at::TensorOptions(comm.device()).dtype(dtype));
  return tensor.set_(c10::Storage(std::move(storage)), 0, sizes, {});
}

}  // namespace fsdpp::comm
