#include "profiler/cpu_observer.h"

#include <ATen/core/TensorBase.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "profiler/clock.h"
#include "profiler/host_log.h"
#include "profiler/op_args.h"

namespace fsdpp::profiler {
namespace {

/// Which record an operator has; it may end in another window or on another thread.
struct OpContext : at::ObserverContext {
  ThreadLog* log = nullptr;
  uint64_t window = 0;
  size_t index = 0;
};

void write_tensor(std::vector<int64_t>& out, const at::TensorBase& tensor) {
  const bool sized = tensor.defined() && tensor.layout() == c10::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
  out.push_back(tensor.defined() ? static_cast<int64_t>(tensor.scalar_type()) : -1);
  out.push_back(sized ? tensor.dim() : 0);
  if (sized) out.insert(out.end(), tensor.sizes().begin(), tensor.sizes().end());
}

template <class List>
void write_list(std::vector<int64_t>& out, const List& list) {
  out.push_back(static_cast<int64_t>(ArgTag::IntList));
  out.push_back(static_cast<int64_t>(list.size()));
  for (size_t i = 0; i < list.size(); ++i) out.push_back(static_cast<int64_t>(list.get(i)));
}

void write_input(std::vector<int64_t>& out, const c10::IValue& value) {
  if (value.isTensor()) {
    out.push_back(static_cast<int64_t>(ArgTag::Tensor));
    write_tensor(out, value.toTensor());
  } else if (value.isTensorList()) {
    const auto list = value.toTensorList();
    out.push_back(static_cast<int64_t>(ArgTag::TensorList));
    out.push_back(static_cast<int64_t>(list.size()));
    for (size_t i = 0; i < list.size(); ++i) write_tensor(out, list.get(i));
  } else if (value.isIntList()) {
    write_list(out, value.toIntList());
  } else if (value.isBoolList()) {
    write_list(out, value.toBoolList());
  } else if (value.isInt() || value.isBool()) {
    out.push_back(static_cast<int64_t>(ArgTag::Int));
    out.push_back(value.isInt() ? value.toInt() : int64_t{value.toBool()});
  } else {
    out.push_back(static_cast<int64_t>(ArgTag::Other));
  }
}

CpuOp::Category category_of(at::RecordScope scope) {
  switch (scope) {
    case at::RecordScope::BACKWARD_FUNCTION: return CpuOp::Category::Backward;
    case at::RecordScope::USER_SCOPE: return CpuOp::Category::User;
    default: return CpuOp::Category::Op;
  }
}

template <bool Inputs>
std::unique_ptr<at::ObserverContext> started(const at::RecordFunction& fn) {
  std::unique_ptr<OpContext> context;
  HostLog::instance().write([&](ThreadLog& log) {
    ThreadRecords& records = log.records;
    RawOp op;
    op.name = fn.name();
    op.sequence = fn.seqNr();
    op.category = category_of(fn.scope());
    op.forward_thread = static_cast<int64_t>(fn.forwardThreadId());
    op.args_begin = op.args_end = records.args.size();
    if constexpr (Inputs) {
      for (const c10::IValue& value : fn.inputs()) write_input(records.args, value);
      op.args_end = records.args.size();
    }
    context = std::make_unique<OpContext>();
    context->log = &log;
    context->window = log.window;
    context->index = records.ops.size();
    op.start_ns = now_ns();  // last: what was done here is not the operator's time
    records.ops.push_back(std::move(op));
  });
  return context;
}

void ended(const at::RecordFunction&, at::ObserverContext* base) {
  const int64_t now = now_ns();
  auto* context = static_cast<OpContext*>(base);
  if (context == nullptr || HostLog::instance().window() != context->window) return;
  std::lock_guard lock(context->log->mutex);
  if (context->log->window == context->window) context->log->records.ops[context->index].end_ns = now;
}

class MemoryObserver : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* ptr, int64_t bytes, size_t total, size_t reserved, c10::Device device) override {
    HostLog::instance().write([&](ThreadLog& log) {
      MemoryEvent event;
      event.time_ns = now_ns();
      event.bytes = bytes;
      event.total_bytes = static_cast<int64_t>(total);
      event.reserved_bytes = static_cast<int64_t>(reserved);
      event.address = reinterpret_cast<uint64_t>(ptr);
      event.device = device.is_cuda() ? device.index() : -1;
      event.thread = log.records.thread;
      log.records.memory.push_back(event);
    });
  }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
};

}  // namespace

struct CpuObserver::Impl {
  at::CallbackHandle handle = 0;
  std::unique_ptr<c10::DebugInfoGuard> memory;
};

CpuObserver::CpuObserver(bool inputs, bool memory) : impl_(std::make_unique<Impl>()) {
  auto callback = inputs ? at::RecordFunctionCallback(&started<true>, &ended) : at::RecordFunctionCallback(&started<false>, &ended);
  callback.needsInputs(inputs).needsIds(true).scopes(
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE});
  impl_->handle = at::addGlobalCallback(callback);
  if (memory) impl_->memory = std::make_unique<c10::DebugInfoGuard>(c10::DebugInfoKind::PROFILER_STATE, std::make_shared<MemoryObserver>());
}

CpuObserver::~CpuObserver() { at::removeCallback(impl_->handle); }

}  // namespace fsdpp::profiler
