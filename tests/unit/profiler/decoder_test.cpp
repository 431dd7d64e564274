#include "profiler/decoder.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "profiler/device_source.h"

namespace fsdpp::profiler {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

/// The step of CUPTI itself, which needs no GPU.
decltype(&cuptiActivityGetNextRecord) cupti_next() {
  static void* library = dlopen(FSDPP_CUPTI_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  return library ? reinterpret_cast<decltype(&cuptiActivityGetNextRecord)>(dlsym(library, "cuptiActivityGetNextRecord")) : nullptr;
}

class DecoderTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(cupti_next(), nullptr) << FSDPP_CUPTI_LIBRARY; }

  template <class Record>
  Record& add(CUpti_ActivityKind kind) {
    used_ += sizeof(Record);
    auto* record = reinterpret_cast<Record*>(buffer_ + used_ - sizeof(Record));
    record->kind = kind;
    return *record;
  }
  CUpti_ActivityKernel10& add_kernel(const char* name, uint64_t start, uint64_t end) {
    auto& k = add<CUpti_ActivityKernel10>(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    k.name = name;
    k.start = start;
    k.end = end;
    return k;
  }
  DeviceRecords decode(size_t cut = 0) {
    DeviceRecords out;
    Decoder decoder({cupti_next(), [](CUpti_CallbackDomain domain, CUpti_CallbackId id) {
                       return (domain == CUPTI_CB_DOMAIN_DRIVER_API ? "cuLaunchKernel" : "cudaLaunchKernel_v7000") + std::string(id ? "" : "?");
                     }},
                    out);
    decoder.decode(buffer_, used_ - cut);
    decoder.finish();
    return out;
  }

  alignas(8) uint8_t buffer_[1 << 16] = {};
  size_t used_ = 0;
};

TEST_F(DecoderTest, EmptyBufferThenNothing) {
  const DeviceRecords out = decode();
  EXPECT_THAT(out.kernels, IsEmpty());
  EXPECT_EQ(out.truncated_buffers, 0);
}

TEST_F(DecoderTest, KernelThenEveryFieldIsRead) {
  auto& k = add_kernel("_Z4gemmiPf", 1000, 2500);
  k.deviceId = 1, k.contextId = 2, k.streamId = 7, k.correlationId = 55;
  k.gridX = 3, k.gridY = 4, k.gridZ = 5, k.blockX = 128, k.blockY = 2, k.blockZ = 1;
  k.registersPerThread = 96;
  k.staticSharedMemory = 100, k.dynamicSharedMemory = 200;
  k.graphNodeId = 0xFFFFFFFFFFULL, k.graphId = 6, k.queued = 900;
  const DeviceRecords out = decode();
  ASSERT_EQ(out.kernels.size(), 1U);
  const Kernel& r = out.kernels[0];
  EXPECT_EQ(r.name, "gemm(int, float*)");
  EXPECT_EQ(r.start_ns, 1000);
  EXPECT_EQ(r.end_ns, 2500);
  EXPECT_EQ(r.device, 1);
  EXPECT_EQ(r.context, 2);
  EXPECT_EQ(r.stream, 7);
  EXPECT_EQ(r.correlation, 55);
  EXPECT_THAT(r.grid, ElementsAre(3, 4, 5));
  EXPECT_THAT(r.block, ElementsAre(128, 2, 1));
  EXPECT_EQ(r.registers, 96);
  EXPECT_EQ(r.shared_memory, 300);
  EXPECT_EQ(r.graph_node_id, 0xFFFFFFFFFFLL);
  EXPECT_EQ(r.graph_id, 6);
  EXPECT_EQ(r.queued_ns, 900);
  EXPECT_EQ(out.truncated_buffers, 0);
}

TEST_F(DecoderTest, CopiesThenKindBytesAndPinned) {
  auto& c = add<CUpti_ActivityMemcpy6>(CUPTI_ACTIVITY_KIND_MEMCPY);
  c.copyKind = CUPTI_ACTIVITY_MEMCPY_KIND_HTOD, c.srcKind = CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE, c.dstKind = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
  c.bytes = 4096, c.start = 5, c.end = 9;
  auto& p = add<CUpti_ActivityMemcpyPtoP4>(CUPTI_ACTIVITY_KIND_MEMCPY2);
  p.bytes = 12;
  auto& m = add<CUpti_ActivityMemset4>(CUPTI_ACTIVITY_KIND_MEMSET);
  m.bytes = 64, m.streamId = 3;
  const DeviceRecords out = decode();
  ASSERT_EQ(out.copies.size(), 3U);
  EXPECT_EQ(out.copies[0].kind, Copy::Kind::HostToDevice);
  EXPECT_EQ(out.copies[0].bytes, 4096);
  EXPECT_FALSE(out.copies[0].pinned);
  EXPECT_EQ(out.copies[1].kind, Copy::Kind::PeerToPeer);
  EXPECT_EQ(out.copies[2].kind, Copy::Kind::Memset);
  EXPECT_EQ(out.copies[2].stream, 3);
}

TEST_F(DecoderTest, CallsThenNamesWithoutVersionAndLaunchMarks) {
  auto& r = add<CUpti_ActivityAPI>(CUPTI_ACTIVITY_KIND_RUNTIME);
  r.cbid = 211, r.start = 10, r.end = 20, r.threadId = 77, r.correlationId = 5;
  auto& failed = add<CUpti_ActivityAPI>(CUPTI_ACTIVITY_KIND_RUNTIME);
  failed.cbid = 211, failed.returnValue = 1;
  auto& d = add<CUpti_ActivityAPI>(CUPTI_ACTIVITY_KIND_DRIVER);
  d.cbid = 307;
  const DeviceRecords out = decode();
  ASSERT_EQ(out.runtime.size(), 3U);
  EXPECT_EQ(out.runtime[0].name, "cudaLaunchKernel");
  EXPECT_EQ(out.runtime[0].thread, 77);
  EXPECT_TRUE(out.runtime[0].launch);
  EXPECT_FALSE(out.runtime[1].launch);  // it returned an error: no kernel follows
  EXPECT_TRUE(out.runtime[2].driver);
  EXPECT_EQ(out.runtime[2].name, "cuLaunchKernel");
}

TEST_F(DecoderTest, WaitBeforeItsEventThenJoined) {
  auto& s = add<CUpti_ActivitySynchronization2>(CUPTI_ACTIVITY_KIND_SYNCHRONIZATION);
  s.type = CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT, s.streamId = 9, s.cudaEventId = 3, s.cudaEventSyncId = 1234, s.correlationId = 8;
  auto& e = add<CUpti_ActivityCudaEvent2>(CUPTI_ACTIVITY_KIND_CUDA_EVENT);
  e.cudaEventSyncId = 1234, e.correlationId = 41, e.eventId = 3;
  auto& lost = add<CUpti_ActivitySynchronization2>(CUPTI_ACTIVITY_KIND_SYNCHRONIZATION);
  lost.cudaEventSyncId = 999, lost.streamId = CUPTI_SYNCHRONIZATION_INVALID_VALUE, lost.type = CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE;
  const DeviceRecords out = decode();
  ASSERT_EQ(out.syncs.size(), 2U);
  EXPECT_EQ(out.syncs[0].kind, Sync::Kind::StreamWaitEvent);
  EXPECT_EQ(out.syncs[0].event_correlation, 41);
  EXPECT_EQ(out.syncs[0].stream, 9);
  EXPECT_EQ(out.syncs[1].event_correlation, 0);
  EXPECT_EQ(out.syncs[1].stream, -1);
  EXPECT_EQ(out.events[0].correlation, 41);
}

TEST_F(DecoderTest, OverheadThenNamedAndItsDataFreed) {
  auto& o = add<CUpti_ActivityOverhead3>(CUPTI_ACTIVITY_KIND_OVERHEAD);
  o.overheadKind = CUPTI_ACTIVITY_OVERHEAD_COMMAND_BUFFER_FULL;
  o.objectKind = CUPTI_ACTIVITY_OBJECT_THREAD;
  o.objectId.pt.threadId = 12;
  o.start = 100, o.end = 300;
  o.overheadData = std::malloc(16);
  auto& unknown = add<CUpti_ActivityOverhead3>(CUPTI_ACTIVITY_KIND_OVERHEAD);
  unknown.overheadKind = static_cast<CUpti_ActivityOverheadKind>(99);
  const DeviceRecords out = decode();
  ASSERT_EQ(out.overheads.size(), 2U);
  EXPECT_EQ(out.overheads[0].kind, "COMMAND_BUFFER_FULL");
  EXPECT_EQ(out.overheads[0].thread, 12);
  EXPECT_EQ(out.overheads[1].kind, "OVERHEAD_99");
}

TEST_F(DecoderTest, DeviceTwiceThenOnce) {
  for (int i = 0; i < 2; ++i) {
    auto& d = add<CUpti_ActivityDevice5>(CUPTI_ACTIVITY_KIND_DEVICE);
    d.name = "NVIDIA H200";
    d.numMultiprocessors = 132, d.numThreadsPerWarp = 32, d.maxWarpsPerMultiprocessor = 64;
    d.computeCapabilityMajor = 9;
  }
  const DeviceRecords out = decode();
  ASSERT_EQ(out.devices.size(), 1U);
  EXPECT_EQ(out.devices[0].name, "NVIDIA H200");
  EXPECT_EQ(out.devices[0].sm_count, 132);
  EXPECT_EQ(out.devices[0].max_threads_per_sm, 2048);
}

TEST_F(DecoderTest, CutInsideTheLastRecordThenTheRestIsKeptAndCounted) {
  add_kernel("first", 1, 2);
  add_kernel("second", 3, 4);
  for (const size_t cut : {size_t{1}, size_t{100}, sizeof(CUpti_ActivityKernel10) - 4}) {
    const DeviceRecords out = decode(cut);
    ASSERT_EQ(out.kernels.size(), 1U) << cut;
    EXPECT_EQ(out.kernels[0].name, "first");
    EXPECT_EQ(out.truncated_buffers, 1) << cut;
  }
}

TEST_F(DecoderTest, KindOfTheFutureThenNamedAndTheBufferMarked) {
  add_kernel("before", 1, 2);
  add<CUpti_ActivityAPI>(static_cast<CUpti_ActivityKind>(9999));
  add_kernel("after", 3, 4);
  const DeviceRecords out = decode();
  EXPECT_EQ(out.kernels.front().name, "before");
  EXPECT_THAT(out.unknown_kinds, ElementsAre(Pair(9999, 1)));
  EXPECT_EQ(out.truncated_buffers, out.kernels.size() == 2 ? 0 : 1);  // lost records are never silent
}

TEST_F(DecoderTest, KindThatWeDoNotReadThenCountedAndTheNextOnesAreRead) {
  add<CUpti_ActivityMarker2>(CUPTI_ACTIVITY_KIND_MARKER).name = "nvtx";
  add_kernel("after", 3, 4);
  const DeviceRecords out = decode();
  ASSERT_EQ(out.kernels.size(), 1U);
  EXPECT_THAT(out.unknown_kinds, ElementsAre(Pair(int{CUPTI_ACTIVITY_KIND_MARKER}, 1)));
  EXPECT_EQ(out.truncated_buffers, 0);
}

TEST_F(DecoderTest, ZeroedTailThenMarked) {
  add_kernel("only", 1, 2);
  used_ += 64;  // CUPTI would call these bytes valid, but there is no record
  const DeviceRecords out = decode();
  EXPECT_EQ(out.kernels.size(), 1U);
  EXPECT_THAT(out.unknown_kinds, IsEmpty());
  EXPECT_EQ(out.truncated_buffers, 1);
}

TEST_F(DecoderTest, ZeroStampsAndBackwardTimesThenKeptForTheAudit) {
  add_kernel("untimed", 0, 0);
  add_kernel("later", 900, 950);
  add_kernel("earlier", 100, 150);
  const DeviceRecords out = decode();
  ASSERT_EQ(out.kernels.size(), 3U);
  EXPECT_EQ(out.kernels[0].start_ns, 0);
  EXPECT_EQ(out.kernels[2].end_ns, 150);
}

TEST_F(DecoderTest, NamelessKernelThenSaidSo) {
  add_kernel(nullptr, 1, 2);
  EXPECT_EQ(decode().kernels[0].name, "(kernel without a name)");
}

TEST(DeviceSource, WithoutGpuThenANoteAndNoRecords) {
  const auto source = make_device_source(1 << 20);
  if (source->problem().empty()) GTEST_SKIP() << "there is a GPU";
  source->begin();
  source->synchronize();
  const DeviceRecords out = source->end();
  EXPECT_FALSE(out.available);
  EXPECT_THAT(out.notes, ElementsAre("the device was not traced: " + source->problem()));
}

}  // namespace
}  // namespace fsdpp::profiler
