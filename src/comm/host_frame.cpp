#include "comm/host_frame.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/fnv.h"

namespace fsdpp::comm {
namespace {

uint64_t hash_of(const std::string& text) {
  if (text.empty()) return 0;
  return std::max<uint64_t>(fnv1a(text), 1);
}

}  // namespace

FrameHeader frame_of(const Op& op, uint8_t phase, uint64_t payload) {
  FrameHeader frame;
  frame.magic = kFrameMagic;
  frame.kind = static_cast<uint8_t>(op.sig.kind);
  frame.reduce = static_cast<uint8_t>(op.sig.reduce);
  frame.dtype = static_cast<int8_t>(op.sig.dtype);
  frame.phase = phase;
  frame.root = op.sig.root;
  frame.sequence = op.sequence;
  frame.count = op.sig.count;
  frame.payload = payload;
  frame.label_hash = hash_of(op.label);
  std::memcpy(frame.label, op.label.data(), std::min(op.label.size(), kLabelBytes));
  return frame;
}

FrameHeader failure_frame(CommErrc code, uint64_t payload) {
  FrameHeader frame;
  frame.magic = kFrameMagic;
  frame.kind = kFailureFrame;
  frame.code = static_cast<uint32_t>(code);
  frame.payload = payload;
  return frame;
}

std::string label_of(const FrameHeader& frame) { return {frame.label, ::strnlen(frame.label, kLabelBytes)}; }

std::string describe(const FrameHeader& frame) {
  const Signature sig{static_cast<OpKind>(frame.kind), static_cast<ReduceOp>(frame.reduce),
                      static_cast<c10::ScalarType>(frame.dtype), frame.root, frame.count};
  return describe(sig, label_of(frame));
}

bool agree(const FrameHeader& mine, const FrameHeader& theirs) {
  const bool labels = mine.label_hash == 0 || theirs.label_hash == 0 || mine.label_hash == theirs.label_hash;
  return mine.kind == theirs.kind && mine.reduce == theirs.reduce && mine.dtype == theirs.dtype &&
         mine.phase == theirs.phase && mine.root == theirs.root && mine.sequence == theirs.sequence &&
         mine.count == theirs.count && labels;
}

}  // namespace fsdpp::comm
