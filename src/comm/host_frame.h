#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "comm/op.h"

/// What goes over the wire between two ranks of a host communicator: frames of a fixed header and a payload. Hosts of
/// one job are taken to have one byte order.
namespace fsdpp::comm {

constexpr size_t kLabelBytes = 80;

struct FrameHeader {
  uint32_t magic = 0;
  uint8_t kind = 0;  ///< OpKind, or kFailureFrame
  uint8_t reduce = 0;
  int8_t dtype = 0;
  uint8_t phase = 0;  ///< an operation may take several exchanges
  int32_t root = 0;
  uint32_t code = 0;  ///< CommErrc of a failure frame
  uint64_t sequence = 0;
  int64_t count = 0;
  uint64_t payload = 0;  ///< bytes that follow
  uint64_t label_hash = 0;
  char label[kLabelBytes] = {};  ///< cut short, padded with zeros
};
static_assert(sizeof(FrameHeader) == 128);

constexpr uint32_t kFrameMagic = 0x46534450;  // "FSDP"
constexpr uint8_t kFailureFrame = 0xFF;
constexpr uint64_t kMaxFailureText = 1 << 16;

[[nodiscard]] FrameHeader frame_of(const Op& op, uint8_t phase, uint64_t payload);
[[nodiscard]] FrameHeader failure_frame(CommErrc code, uint64_t payload);
[[nodiscard]] std::string label_of(const FrameHeader& frame);
/// describe() of the operation in a frame.
[[nodiscard]] std::string describe(const FrameHeader& frame);
/// True if both stand for the same operation and exchange of it.
[[nodiscard]] bool agree(const FrameHeader& mine, const FrameHeader& theirs);

}  // namespace fsdpp::comm
