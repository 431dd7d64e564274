#include "comm/nccl_api.h"

#include <dlfcn.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "base/enforce.h"

namespace fsdpp::comm {
namespace {

std::string version_text(int code) { return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100); }

ncclResult_t all_to_all(const Op& op, ncclComm_t comm, int size, CUstream_st* stream) {
  const size_t part = op.in_bytes() / static_cast<size_t>(size);
  NcclGroup group;
  for (int r = 0; r < size; ++r) {
    const size_t offset = static_cast<size_t>(r) * part;
    ncclResult_t result = ncclSend(static_cast<const char*>(op.in) + offset, part, ncclUint8, r, comm, stream);
    if (result == ncclSuccess) result = ncclRecv(static_cast<char*>(op.out) + offset, part, ncclUint8, r, comm, stream);
    if (result != ncclSuccess) return result;
  }
  return group.finish();
}

}  // namespace

ncclDataType_t to_nccl(c10::ScalarType dtype) {
  using c10::ScalarType;
  switch (dtype) {
    case ScalarType::Float:
      return ncclFloat32;
    case ScalarType::Double:
      return ncclFloat64;
    case ScalarType::Half:
      return ncclFloat16;
    case ScalarType::BFloat16:
      return ncclBfloat16;
    case ScalarType::Bool:
    case ScalarType::Byte:
      return ncclUint8;
    case ScalarType::Char:
      return ncclInt8;
    case ScalarType::Int:
      return ncclInt32;
    case ScalarType::Long:
      return ncclInt64;
    default:
      fail<UsageError>("NCCL moves no {}. Try: Float, Double, Half, BFloat16, Byte, Char, Int, Long or Bool",
                       c10::toString(dtype));
  }
}

ncclRedOp_t to_nccl(ReduceOp op) {
  switch (op) {
    case ReduceOp::Max:
      return ncclMax;
    case ReduceOp::Min:
      return ncclMin;
    case ReduceOp::Sum:
      break;
  }
  return ncclSum;
}

std::string nccl_text(const char* call, ncclResult_t result) {
  return fmt::format("{} failed: {} ({})", call, ncclGetErrorString(result), ncclGetLastError(nullptr));
}

void check_nccl_version(int header, int library, const std::string& path) {
  if (header / 100 == library / 100) return;
  fail_comm(CommErrc::Backend,
            "NCCL: expected version {} (the header that fsdpp was compiled with), got {} from {}. Try: put the library "
            "of LibTorch's own "
            "nccl wheel first on LD_LIBRARY_PATH, or build fsdpp against the other one",
            version_text(header), version_text(library), path);
}

void check_nccl_version() {
  int library = 0;
  ncclGetVersion(&library);
  Dl_info where{};
  const bool known =
      ::dladdr(reinterpret_cast<const void*>(&ncclGetVersion), &where) != 0 && where.dli_fname != nullptr;
  check_nccl_version(NCCL_VERSION_CODE, library, known ? where.dli_fname : "an unknown path");
}

ncclResult_t nccl_issue(const Op& op, ncclComm_t comm, int size, CUstream_st* stream) {
  const auto count = static_cast<size_t>(op.sig.count);
  const ncclDataType_t type = to_nccl(op.sig.dtype);
  switch (op.sig.kind) {
    case OpKind::AllGather:
      return ncclAllGather(op.in, op.out, count, type, comm, stream);
    case OpKind::ReduceScatter:
      return ncclReduceScatter(op.in, op.out, count / static_cast<size_t>(size), type, to_nccl(op.sig.reduce), comm,
                               stream);
    case OpKind::Barrier:
    case OpKind::AllReduce:
      return ncclAllReduce(op.in, op.out, count, type, to_nccl(op.sig.reduce), comm, stream);
    case OpKind::Broadcast:
      return ncclBroadcast(op.in, op.out, count, type, op.sig.root, comm, stream);
    case OpKind::AllToAll:
      return all_to_all(op, comm, size, stream);
  }
  return ncclInvalidUsage;
}

bool run_bounded(std::function<void()> task, std::chrono::milliseconds limit) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  auto state = std::make_shared<State>();
  std::thread([state, task = std::move(task)] {
    task();
    std::lock_guard lock(state->mutex);
    state->done = true;
    state->changed.notify_all();
  }).detach();
  std::unique_lock lock(state->mutex);
  return state->changed.wait_for(lock, limit, [&] { return state->done; });
}

}  // namespace fsdpp::comm
