#include "bare_nccl.h"

#if FSDPP_CUDA
#include <nccl.h>

#include <cstring>
#endif

namespace bench {

#if FSDPP_CUDA
namespace {

void check(const char* call, ncclResult_t result) {
  if (result != ncclSuccess)
    throw fsdpp::CommError(fsdpp::CommErrc::Backend,
                           std::string("bare loop: ") + call + " failed: " + ncclGetErrorString(result));
}

ncclDataType_t to_nccl(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return ncclFloat32;
    case c10::ScalarType::BFloat16:
      return ncclBfloat16;
    default:
      throw fsdpp::UsageError(std::string("bare loop: expected Float or BFloat16, got ") + c10::toString(dtype));
  }
}

ncclUniqueId exchange_id(fsdpp::comm::World& world) {
  const std::string key = "bench/bare_nccl_id";
  ncclUniqueId id;
  if (world.rank() == 0) {
    check("ncclGetUniqueId", ncclGetUniqueId(&id));
    world.store().set(key, std::string(id.internal, sizeof id.internal));
    return id;
  }
  const auto bytes = world.store().get(key, std::chrono::seconds(60));
  std::memcpy(id.internal, bytes.data(), sizeof id.internal);
  return id;
}

class BareNccl final : public BareCollectives {
 public:
  explicit BareNccl(fsdpp::comm::World& world) {
    check("ncclCommInitRank", ncclCommInitRank(&comm_, world.size(), exchange_id(world), world.rank()));
  }
  ~BareNccl() override { (void)ncclCommDestroy(comm_); }

  void all_gather(void* out, const void* in, int64_t count, c10::ScalarType dtype, fsdpp::cuda::StreamView stream) override {
    check("ncclAllGather", ncclAllGather(in, out, static_cast<size_t>(count), to_nccl(dtype), comm_, stream.handle()));
  }
  void reduce_scatter(void* out, const void* in, int64_t count, c10::ScalarType dtype, fsdpp::cuda::StreamView stream) override {
    check("ncclReduceScatter",
          ncclReduceScatter(in, out, static_cast<size_t>(count), to_nccl(dtype), ncclSum, comm_, stream.handle()));
  }
  std::string version() const override {
    int code = 0;
    check("ncclGetVersion", ncclGetVersion(&code));
    return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." + std::to_string(code % 100);
  }

 private:
  ncclComm_t comm_ = nullptr;
};

}  // namespace

std::unique_ptr<BareCollectives> make_bare_collectives(fsdpp::comm::World& world) {
  if (!world.device().is_cuda()) return nullptr;
  return std::make_unique<BareNccl>(world);
}
#else
std::unique_ptr<BareCollectives> make_bare_collectives(fsdpp::comm::World&) { return nullptr; }
#endif

}  // namespace bench
