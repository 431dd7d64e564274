// NCCL operations in a CUDA graph, and NCCL's registered memory. One process for each rank, on CUDA; fails without a GPU. All tests can
// run on one GPU, where memory is registered but used like any other; on several GPUs of one host its own kernels and copy engines run.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "comm/nccl_communicator.h"
#include "fsdpp/base/error.h"
#include "fsdpp/comm/buffers.h"
#include "support/world_size.h"

namespace fsdpp::test {
namespace {

std::shared_ptr<comm::World> make_world() {
  comm::WorldOptions options;
  options.device = c10::kCUDA;
  auto world = comm::World::init(options);
  expect_started_world_size(*world);
  return world;
}
comm::World& the_world() {  // for all tests
  static const auto world = make_world();
  return *world;
}

// Fork to a side stream, gather there, join: as the engine does. Replayed with new inputs, watched all the time.
TEST(NcclGraph, GatherIsCapturedThenReplaysGatherNewInputs) {
  auto* world = &the_world();
  auto comm = world->make_communicator("graph");
  const int64_t count = 1000, size = world->size();
  const auto kind = at::device(world->device()).dtype(at::kFloat);
  const auto in = at::zeros({count}, kind), out = at::zeros({count * size}, kind);
  const cuda::Stream main(world->device()), side(world->device());
  const comm::Buffer all{out.data_ptr(), count * size};
  const comm::ConstBuffer mine{in.data_ptr(), count, at::kFloat};
  comm->all_gather(all, mine, main, {.label = "warm-up"}).wait_host();

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(main.view().handle(), cudaStreamCaptureModeGlobal), cudaSuccess);
  side.view().wait(main.view());
  const comm::Ticket ticket = comm->all_gather(all, mine, side, {.label = "captured"});
  cuda::StreamView().sleep(600);  // the watchdog has several turns while the capture is open
  ticket.wait(main);
  ASSERT_EQ(cudaStreamEndCapture(main.view().handle(), &graph), cudaSuccess);
  EXPECT_THROW((void)ticket.query(), UsageError);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);

  for (int step = 1; step <= 3; ++step) {
    in.fill_(step * 100 + world->rank());
    main.view().wait(cuda::current_stream(world->device()));
    ASSERT_EQ(cudaGraphLaunch(exec, main.view().handle()), cudaSuccess);
    comm->barrier();  // an eager operation between replays
    main.view().synchronize();
    const auto host = out.cpu();
    for (int64_t r = 0; r < size; ++r)
      EXPECT_EQ(host[r * count + count - 1].item<float>(), static_cast<float>(step * 100 + r));
  }
  cudaGraphExecDestroy(exec);  // before the communicator: it must outlive its graphs
  cudaGraphDestroy(graph);
}

/// In-place gather and reduce-scatter, as the engine's: rank r puts in r + `seed`.
struct InPlace {
  InPlace(comm::Communicator& c, int64_t n)
      : comm(c), count(n), whole(comm::allocate_tensor(c, {n * c.size()}, at::kFloat, "whole")),
        sums(comm::allocate_tensor(c, {n * c.size()}, at::kFloat, "sums")) {}
  void fill(float seed) const {
    whole.zero_();
    whole.narrow(0, count * comm.rank(), count).fill_(seed + static_cast<float>(comm.rank()));
    sums.fill_(seed + static_cast<float>(comm.rank()));
  }
  void run(cuda::StreamView stream) const {
    char* mine = static_cast<char*>(whole.data_ptr()) + count * comm.rank() * 4;
    comm.all_gather({whole.data_ptr(), whole.numel()}, {mine, count, at::kFloat}, stream, {.label = "gather"}).wait(stream);
    char* slice = static_cast<char*>(sums.data_ptr()) + count * comm.rank() * 4;
    comm.reduce_scatter({slice, count}, {sums.data_ptr(), sums.numel(), at::kFloat}, comm::ReduceOp::Sum, stream, {.label = "reduce"}).wait(stream);
  }
  void expect(float seed) const {
    const int n = comm.size();
    const auto host = whole.cpu();
    for (int r = 0; r < n; ++r)
      EXPECT_TRUE(at::equal(host.narrow(0, count * r, count), at::full({count}, seed + static_cast<float>(r)))) << "rank " << r;
    const float sum = static_cast<float>(n) * seed + static_cast<float>(n * (n - 1) / 2);
    EXPECT_TRUE(at::equal(sums.cpu().narrow(0, count * comm.rank(), count), at::full({count}, sum)));
  }

  comm::Communicator& comm;
  int64_t count;
  at::Tensor whole, sums;
};

TEST(NcclBuffers, KernelsOrCopyEnginesThenEveryValueIsThere) {
  const auto stream = cuda::current_stream(the_world().device());
  for (const bool engines : {false, true})
    for (const int64_t count : {4, 4096, 1 << 20}) {
      const auto comm = the_world().make_communicator("buffers", {}, {.copy_engine = engines, .max_ctas = engines ? 4 : 0});
      const cuda::Stream own(the_world().device());
      const InPlace buffers(*comm, count);
      for (int i = 0; i < 5; ++i) {
        buffers.fill(static_cast<float>(i));
        own.view().wait(stream);
        buffers.run(own);
        stream.wait(own);
        buffers.expect(static_cast<float>(i));
      }
    }
}

// Without asking whether symmetric kernels will use it: NCCL registers and forgets memory, in order.
std::shared_ptr<comm::Communicator> registering_communicator(const std::string& name) {
  auto& world = the_world();
  comm::CommInfo info{name, {}, world.rank(), world.device(), std::chrono::seconds(60)};
  for (int r = 0; r < world.size(); ++r) info.ranks.push_back(r);
  info.assume_windows = true;
  const std::shared_ptr<comm::Store> store(&world.store(), [](auto*) {});
  return comm::make_nccl_communicator(info, {store, name, "127.0.0.1", std::chrono::seconds(60)});
}

/// NCCL refuses parts that are no multiple of 16 bytes there, before anything is sent.
bool is_registered(comm::Communicator& comm, const InPlace& buffers) {
  const cuda::Stream own(comm.device());
  const comm::ConstBuffer odd{buffers.whole.data_ptr(), 1, at::kFloat};
  if (comm.size() == 1) return false;
  try {
    comm.all_gather({buffers.whole.data_ptr(), comm.size()}, odd, own).wait_host();
    return false;
  } catch (const UsageError&) {
    return true;
  }
}

TEST(NcclBuffers, PartsThatAreNoMultipleOf16BytesThenUsageErrorAndStillUsable) {
  if (the_world().size() == 1) GTEST_SKIP() << "nobody to register for";
  const auto comm = registering_communicator("odd");
  const InPlace buffers(*comm, 4096);
  EXPECT_TRUE(is_registered(*comm, buffers));
  buffers.fill(3);
  buffers.run(cuda::current_stream(the_world().device()));
  buffers.expect(3);
}

TEST(NcclBuffers, OperationsAreCapturedThenReplaysTakeNewValues) {
  const auto device = the_world().device();
  for (const bool engines : {false, true}) {
    const auto comm = the_world().make_communicator("captured", {}, {.copy_engine = engines});
    const cuda::Stream main(device);
    const InPlace buffers(*comm, 1000);
    buffers.fill(1);
    main.view().wait(cuda::current_stream(device));
    buffers.run(main);
    main.view().synchronize();
    const bool refuses = engines && is_registered(*comm, buffers);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(main.view().handle(), cudaStreamCaptureModeGlobal), cudaSuccess);
    if (comm->size() > 1) {
      const cuda::StreamGuard guard(main.view());
      EXPECT_THROW((void)comm->allocate(64), UsageError) << "inside a capture";
    }
    if (refuses) {
      EXPECT_THROW(buffers.run(main), UsageError);
      ASSERT_EQ(cudaStreamEndCapture(main.view().handle(), &graph), cudaSuccess);
      cudaGraphDestroy(graph);
      continue;
    }
    buffers.run(main);
    ASSERT_EQ(cudaStreamEndCapture(main.view().handle(), &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (int step = 2; step <= 4; ++step) {
      buffers.fill(static_cast<float>(step));
      main.view().wait(cuda::current_stream(device));
      ASSERT_EQ(cudaGraphLaunch(exec, main.view().handle()), cudaSuccess);
      main.view().synchronize();
      buffers.expect(static_cast<float>(step));
      comm->barrier();
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
}

TEST(NcclBuffers, MemoryIsRegisteredThenItIsUsedFreedAndOutlivesTheCommunicator) {
  if (the_world().size() == 1) GTEST_SKIP() << "nobody to register for";
  at::Tensor last;
  {
    const auto comm = registering_communicator("registered");
    const auto memory = comm->allocate(100, {.label = "small"});
    EXPECT_TRUE(memory.registered);
    EXPECT_EQ(memory.bytes, comm::kRegisteredGranule);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data.get()) % 4096, 0);
    for (int i = 0; i < 3; ++i) {
      const InPlace buffers(*comm, 4096 << i);  // freed at the end of each turn
      buffers.fill(static_cast<float>(i));
      buffers.run(cuda::current_stream(the_world().device()));
      buffers.expect(static_cast<float>(i));
    }
    last = comm::allocate_tensor(*comm, {1000}, at::kFloat).fill_(7);
  }
  EXPECT_TRUE(at::equal(last.cpu(), at::full({1000}, 7.0F)));
}

TEST(NcclBuffers, RanksFreeDifferentOnesThenTheNextAllocationTellsAll) {
  if (the_world().size() == 1) GTEST_SKIP() << "no other rank";
  const auto comm = registering_communicator("freed");
  std::vector<comm::Allocation> held;
  for (int i = 0; i < 2; ++i) held.push_back(comm->allocate(1 << 20));
  held.erase(held.begin() + (the_world().rank() == 0 ? 0 : 1));
  try {
    (void)comm->allocate(1 << 20);
    ADD_FAILURE() << "the ranks' windows differ";
  } catch (const CommError& error) {
    EXPECT_EQ(error.code(), CommErrc::Mismatch);
    EXPECT_NE(std::string(error.what()).find("still hold"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace fsdpp::test
