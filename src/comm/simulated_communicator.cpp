#include "comm/simulated_communicator.h"

#include <algorithm>

namespace fsdpp::comm {
namespace {

// `parts` times the first part.
void repeat(char* data, int64_t part, int64_t parts, cuda::StreamView stream) {
  for (int64_t filled = 1; filled < parts; filled *= 2)
    stream.copy(data + filled * part, data, std::min(filled, parts - filled) * part);
}

void copy_unless_there(void* out, const void* in, int64_t bytes, cuda::StreamView stream) {
  if (out != in && bytes > 0) stream.copy(out, in, bytes);
}

}  // namespace

SimulatedCommunicator::SimulatedCommunicator(CommInfo info, const FabricRing& ring,
                                             std::shared_ptr<SimulatedWires> wires, int user)
    : FrontCommunicator(std::move(info)), ring_(ring), wires_(std::move(wires)), user_(user) {}

int64_t SimulatedCommunicator::whole_bytes(const Op& op) const {
  const auto in = static_cast<int64_t>(op.in_bytes());
  return op.sig.kind == OpKind::AllGather ? in * size() : in;
}

double SimulatedCommunicator::seconds_of(const Op& op) const {
  switch (op.sig.kind) {
    case OpKind::AllReduce:
      return ring_.all_reduce(whole_bytes(op));
    case OpKind::Broadcast:
      return ring_.broadcast(whole_bytes(op));
    default:
      return ring_.gather(whole_bytes(op));
  }
}

void SimulatedCommunicator::move(const Op& op, cuda::StreamView stream) const {
  const auto in = static_cast<int64_t>(op.in_bytes());
  switch (op.sig.kind) {
    case OpKind::AllGather:
    case OpKind::AllToAll: {
      const int64_t part = op.sig.kind == OpKind::AllGather ? in : in / size();
      copy_unless_there(op.out, op.in, part, stream);
      if (part > 0) repeat(static_cast<char*>(op.out), part, size(), stream);
      return;
    }
    case OpKind::ReduceScatter:
      return copy_unless_there(op.out, op.in, in / size(), stream);
    default:
      return copy_unless_there(op.out, op.in, in, stream);
  }
}

Ticket SimulatedCommunicator::issue(Op op, cuda::StreamView stream) {
  move(op, stream);
  const auto wire = ring_.nodes > 1 ? SimulatedWires::Wire::Between : SimulatedWires::Wire::Within;
  return wires_->carry({wire, user_, whole_bytes(op), seconds_of(op)}, stream, shared_failure());
}

// The other ranks agree with this one.
void SimulatedCommunicator::gather_numbers(std::span<int64_t> all, std::span<const int64_t> mine, const OpInfo&) {
  for (auto out = all.begin(); out != all.end(); out += std::ssize(mine)) std::copy(mine.begin(), mine.end(), out);
}

Ticket SimulatedCommunicator::copy(const Op& op, cuda::StreamView stream) {
  copy_unless_there(op.out, op.in, static_cast<int64_t>(op.in_bytes()), stream);
  return wires_->after(stream, shared_failure());
}

}  // namespace fsdpp::comm
