#pragma once
#include <nccl.h>

#include <chrono>
#include <functional>
#include <string>

#include "comm/op.h"

namespace fsdpp::comm {

[[nodiscard]] ncclDataType_t to_nccl(c10::ScalarType dtype);
[[nodiscard]] ncclRedOp_t to_nccl(ReduceOp op);

/// "ncclAllGather failed: remote process exited or there was a network error (…)". Reads NCCL's process-wide last
/// error.
[[nodiscard]] std::string nccl_text(const char* call, ncclResult_t result);

/// Throws CommError{Backend} unless the library loaded at run time has the major and minor version of the header that
/// fsdpp was compiled with; the text names both and the library's path.
void check_nccl_version();
void check_nccl_version(int header, int library, const std::string& path);

/// Issues `op` on `stream`. The caller closes groups and records events.
[[nodiscard]] ncclResult_t nccl_issue(const Op& op, ncclComm_t comm, int size, CUstream_st* stream);

/// Opens a group of NCCL calls; closed on every way out. `finish()` closes it and gives the result.
class NcclGroup {
 public:
  NcclGroup() : result_(ncclGroupStart()), open_(result_ == ncclSuccess) {}
  ~NcclGroup() {
    if (open_) (void)ncclGroupEnd();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  [[nodiscard]] ncclResult_t finish() {
    if (!open_) return result_;
    open_ = false;
    return ncclGroupEnd();
  }

 private:
  ncclResult_t result_;
  bool open_;
};

/// Runs `task` on a thread of its own for at most `limit`; false: it goes on alone. For NCCL calls that may never
/// return.
[[nodiscard]] bool run_bounded(std::function<void()> task, std::chrono::milliseconds limit);

}  // namespace fsdpp::comm
