#include "comm/front.h"

#include <algorithm>
#include <cstring>

#include "base/enforce.h"
#include "fsdpp/trace/scope.h"

namespace fsdpp::comm {
namespace {

using c10::ScalarType;

bool movable(ScalarType t) {
  switch (t) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::Int:
    case ScalarType::Long:
    case ScalarType::Bool:
      return true;
    default:
      return false;
  }
}

struct Shape {
  int64_t in_parts, out_parts;  // `in` and `out` hold so many equal parts
  const void* in_place;         // where `in` starts when the operation is in place
};

template <class Who>
void expect_counts(const Who& who, Buffer out, ConstBuffer in, const Shape& shape) {
  FSDPP_ENFORCE(in.count >= 0 && out.count >= 0, UsageError, "{}: expected counts of 0 or more, got in {} and out {}",
                who(), in.count, out.count);
  FSDPP_ENFORCE(in.count * shape.out_parts == out.count * shape.in_parts, UsageError,
                "{}: expected in.count : out.count = {} : {}, got {} : {}", who(), shape.in_parts, shape.out_parts,
                in.count, out.count);
  FSDPP_ENFORCE(in.dtype == out.dtype, UsageError, "{}: expected one dtype, got in {} and out {}", who(),
                c10::toString(in.dtype), c10::toString(out.dtype));
  FSDPP_ENFORCE((in.data != nullptr || in.count == 0) && (out.data != nullptr || out.count == 0), UsageError,
                "{}: expected memory for {} elements, got a null pointer", who(), std::max(in.count, out.count));
}

template <class Who>
void expect_no_overlap(const Who& who, Buffer out, ConstBuffer in, const Shape& shape) {
  const auto bytes = c10::elementSize(in.dtype);
  const auto* in_begin = static_cast<const char*>(in.data);
  const auto* out_begin = static_cast<const char*>(out.data);
  const bool overlap = in.count > 0 && out.count > 0 && in_begin < out_begin + out.count * bytes &&
                       out_begin < in_begin + in.count * bytes;
  if (!overlap || (shape.in_place != nullptr && in.data == shape.in_place)) return;
  fail<UsageError>(
      "{}: `in` and `out` overlap but not as an in-place call of this operation. Try: see communicator.h for the "
      "in-place rule.",
      who());
}

const void* at(const void* base, int64_t elements, ScalarType dtype) {
  return static_cast<const char*>(base) + elements * static_cast<int64_t>(c10::elementSize(dtype));
}

Shape shape_of(OpKind kind, int size, int rank, Buffer out, ConstBuffer in) {
  switch (kind) {
    case OpKind::AllGather:
      return {1, size, at(out.data, rank * in.count, in.dtype)};
    case OpKind::ReduceScatter:
      return {size, 1, static_cast<const char*>(out.data) - rank * out.count * int64_t(c10::elementSize(in.dtype))};
    case OpKind::AllToAll:
      return {1, 1, nullptr};
    default:
      return {1, 1, out.data};
  }
}

}  // namespace

void FrontCommunicator::check_dtype(const Signature& sig) const {
  const bool ok = movable(sig.dtype) && !(reduces(sig.kind) && sig.dtype == ScalarType::Bool);
  FSDPP_ENFORCE(
      ok, UsageError,
      "{} on communicator '{}': dtype {} is not supported. Try: Float, Double, Half, BFloat16 or a whole-number type.",
      name_of(sig.kind), name(), c10::toString(sig.dtype));
}

Op FrontCommunicator::make_op(const Signature& sig, void* out, const void* in, const OpInfo& info) {
  Op op{sig, out, in, next_, std::string(info.label), info.timeout.count() > 0 ? info.timeout : info_.timeout};
  if (size() > 1) ++next_;
  return op;
}

Ticket FrontCommunicator::start(Signature sig, Buffer out, ConstBuffer in, cuda::StreamView stream,
                                const OpInfo& info) {
  failure_->check();
  sig.dtype = in.dtype;
  sig.count = in.count;
  const auto who = [&] { return fmt::format("{} '{}' on communicator '{}'", name_of(sig.kind), info.label, name()); };
  const Shape shape = shape_of(sig.kind, size(), rank(), out, in);
  expect_counts(who, out, in, shape);
  check_dtype(sig);
  expect_no_overlap(who, out, in, shape);
  FSDPP_ENFORCE(sig.root >= 0 && sig.root < size(), UsageError, "{}: expected a root from 0 to {}, got {}", who(),
                size() - 1, sig.root);
  FSDPP_ENFORCE(stream.is_cuda() == info_.device.is_cuda(), UsageError, "{}: expected a stream of {}, got one of {}",
                who(), info_.device.str(), stream.is_cuda() ? "a CUDA device" : "the CPU");
  Op op = make_op(sig, out.data, in.data, info);
  if (size() == 1) return finish(copy(op, stream));
  const int64_t bytes = std::max(in.count, out.count) * static_cast<int64_t>(c10::elementSize(in.dtype));
  const trace::CollectiveScope scope({name(), name_of(sig.kind), info.label, static_cast<int64_t>(op.sequence), bytes, in_group_});
  return finish(issue(std::move(op), stream));
}

Ticket FrontCommunicator::finish(Ticket ticket) {
  if (!in_group_) return ticket;
  group_last_ = std::move(ticket);
  return {};
}

Ticket FrontCommunicator::copy(const Op& op, cuda::StreamView) {
  if (op.out != op.in && op.sig.count > 0) std::memcpy(op.out, op.in, op.in_bytes());
  return {};
}

Ticket FrontCommunicator::all_gather(Buffer out, ConstBuffer in, cuda::StreamView stream, const OpInfo& info) {
  return start({.kind = OpKind::AllGather}, out, in, stream, info);
}
Ticket FrontCommunicator::reduce_scatter(Buffer out, ConstBuffer in, ReduceOp op, cuda::StreamView stream,
                                         const OpInfo& info) {
  return start({.kind = OpKind::ReduceScatter, .reduce = op}, out, in, stream, info);
}
Ticket FrontCommunicator::all_reduce(Buffer out, ConstBuffer in, ReduceOp op, cuda::StreamView stream,
                                     const OpInfo& info) {
  return start({.kind = OpKind::AllReduce, .reduce = op}, out, in, stream, info);
}
Ticket FrontCommunicator::broadcast(Buffer inout, int root, cuda::StreamView stream, const OpInfo& info) {
  return start({.kind = OpKind::Broadcast, .root = root}, inout, inout, stream, info);
}
Ticket FrontCommunicator::all_to_all(Buffer out, ConstBuffer in, cuda::StreamView stream, const OpInfo& info) {
  return start({.kind = OpKind::AllToAll}, out, in, stream, info);
}

void FrontCommunicator::group_begin() {
  failure_->check();
  FSDPP_ENFORCE(!in_group_, UsageError,
                "communicator '{}': group_begin inside an open group. Try: close the first group.", name());
  open_group();
  in_group_ = true;
}

Ticket FrontCommunicator::group_end() {
  FSDPP_ENFORCE(in_group_, UsageError, "communicator '{}': group_end without group_begin", name());
  in_group_ = false;
  const trace::CollectiveScope scope({.comm = name(), .op = "group", .label = {}, .sequence = -1});
  return close_group(std::exchange(group_last_, {}));
}

void FrontCommunicator::barrier(const OpInfo& info) {
  failure_->check();
  FSDPP_ENFORCE(!in_group_, UsageError, "communicator '{}': barrier inside a group", name());
  if (size() > 1) issue_barrier(make_op({.kind = OpKind::Barrier}, nullptr, nullptr, info));
}

void FrontCommunicator::abort(const std::string& why) noexcept {
  try {
    fail(CommErrc::Aborted, fmt::format("communicator '{}' was aborted: {}", name(), why));
  } catch (...) {  // no memory for the text
    fail(CommErrc::Aborted, why);
  }
}

Group::~Group() {
  if (comm_ == nullptr) return;
  try {
    comm_->group_end();
  } catch (...) {  // the error that leaves this scope is the one to see
  }
}

}  // namespace fsdpp::comm
