// NCCL operations in a CUDA graph. One process for each rank, on CUDA; fails without a GPU.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "fsdpp/base/error.h"
#include "support/world_size.h"

namespace fsdpp::test {
namespace {

// Fork to a side stream, gather there, join: as the engine does. Replayed with new inputs, watched all the time.
TEST(NcclGraph, GatherIsCapturedThenReplaysGatherNewInputs) {
  comm::WorldOptions options;
  options.device = c10::kCUDA;
  auto world = comm::World::init(options);
  expect_started_world_size(*world);
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

}  // namespace
}  // namespace fsdpp::test
