// Streams, events and host memory as they behave for the CPU device; on GPUs the distributed tests exercise them.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>

#include "fsdpp/base/error.h"
#include "fsdpp/cuda/pinned.h"
#include "fsdpp/cuda/stream.h"

namespace fsdpp::cuda {
namespace {

TEST(CpuStream, WaitsAreSatisfiedAtOnce) {
  StreamView cpu = current_stream(c10::Device(c10::kCPU));
  EXPECT_FALSE(cpu.is_cuda());
  EXPECT_TRUE(cpu == Stream(c10::Device(c10::kCPU)).view());
  Event event;
  EXPECT_FALSE(event.recorded());
  cpu.wait(event);
  event.record(cpu);
  EXPECT_TRUE(event.recorded());
  EXPECT_TRUE(event.query());
  event.synchronize();
  cpu.wait(event);
  cpu.wait(cpu);
  cpu.synchronize();
}

TEST(CpuStream, MovedEventIsRecordedAtItsNewPlace) {
  Event a;
  a.record(StreamView());
  Event b = std::move(a);
  EXPECT_TRUE(b.recorded());
  Event c;
  c = std::move(b);
  EXPECT_TRUE(c.recorded());
}

TEST(CpuStream, SleepTakesItsTimeAndCopyCopies) {
  auto start = std::chrono::steady_clock::now();
  StreamView().sleep(20);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(20));
  int source[4] = {1, 2, 3, 4}, target[4] = {};
  StreamView().copy(target, source, sizeof(source));
  EXPECT_EQ(target[3], 4);
}

TEST(CudaStream, WithoutADeviceIsAnErrorThatSaysSo) {
  if (available()) {
    EXPECT_TRUE(Stream(c10::Device(c10::kCUDA, 0)).view().is_cuda());
    return;
  }
  EXPECT_ANY_THROW(Stream(c10::Device(c10::kCUDA, 0)));
}

TEST(PinnedBuffer, IsAlignedWritableAndMovable) {
  PinnedBuffer buffer(1000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
  EXPECT_EQ(buffer.bytes(), 1000u);
  EXPECT_EQ(buffer.pinned(), available());
  buffer.as<uint8_t>()[999] = 7;
  PinnedBuffer moved = std::move(buffer);
  EXPECT_EQ(buffer.data(), nullptr);  // NOLINT: what a moved-from buffer is, is part of the contract
  EXPECT_EQ(moved.as<uint8_t>()[999], 7);
  EXPECT_EQ(PinnedBuffer(0).data(), nullptr);
}

}  // namespace
}  // namespace fsdpp::cuda
