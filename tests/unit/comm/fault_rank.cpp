// One rank of the tests that need real processes: fault_rank MODE [TIMEOUT_MS [RENDEZVOUS_MS]]. Prints what it was
// told; exit code 0 fine, 2 ConfigError, 3 time-out of the rendezvous, 4 another CommError, 5 anything else. On CUDA
// with FSDPP_TEST_DEVICE=cuda.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/buffers.h"
#include "fsdpp/comm/mesh.h"

namespace {

using namespace std::chrono_literals;
using fsdpp::comm::World;

bool on_cuda() { return std::getenv("FSDPP_TEST_DEVICE") != nullptr; }

void reduce(const World& world, fsdpp::comm::Communicator& comm, const char* label, int64_t count = 1000) {
  const auto data = at::ones({count}, at::device(world.device()).dtype(at::kFloat));
  const fsdpp::comm::Buffer all{data.data_ptr(), count};
  comm.all_reduce(all, all, fsdpp::comm::ReduceOp::Sum, fsdpp::cuda::current_stream(world.device()), {.label = label})
      .wait_host();
}

/// Gathers in memory that the communicator allocated: where the machine allows it, by kernels that can't be aborted.
void gather_in(const at::Tensor& whole, fsdpp::comm::Communicator& comm, const char* label) {
  const int64_t count = whole.numel() / comm.size();
  const auto part = whole.narrow(0, count * comm.rank(), count);
  part.fill_(comm.rank());
  const fsdpp::cuda::Stream stream(whole.device());  // copy engines take none of CUDA's default streams
  stream.view().wait(fsdpp::cuda::current_stream(whole.device()));
  comm.all_gather({whole.data_ptr(), whole.numel()}, {part.data_ptr(), count, at::kFloat}, stream, {.label = label}).wait_host();
}

void run(const std::string& mode, const std::shared_ptr<World>& world) {
  if (mode == "init") return world->barrier();
  auto mesh = fsdpp::comm::Mesh::shard(world);
  auto& comm = mesh->reduce_comm();
  if (mode == "step") return reduce(*world, comm, "fine");
  if (mode == "die") {  // rank 1 is killed while the others wait for it
    reduce(*world, comm, "before");
    if (world->rank() == 1) {
      std::this_thread::sleep_for(100ms);
      std::raise(SIGKILL);
    }
    return reduce(*world, comm, "layers.3 backward");
  }
  if (mode == "die_symmetric" || mode == "die_copy_engine") {  // as "die", in registered memory
    const auto comm = world->make_communicator("symmetric", {}, {.copy_engine = mode == "die_copy_engine"});
    const auto whole = fsdpp::comm::allocate_tensor(*comm, {int64_t{1} << 20}, at::kFloat, "whole");
    gather_in(whole, *comm, "before");
    if (world->rank() == 1) {
      std::this_thread::sleep_for(100ms);
      std::raise(SIGKILL);
    }
    return gather_in(whole, *comm, "layers.3 backward");
  }
  if (mode == "skip_barrier") {
    if (world->rank() != 1) return world->barrier();
    return std::this_thread::sleep_for(1500ms);
  }
  if (mode == "never") {  // rank 1 leaves out an operation
    reduce(*world, comm, "before");
    if (world->rank() != 1) return reduce(*world, comm, "layers.3 backward");
    return std::this_thread::sleep_for(8s);
  }
  if (mode == "mismatch") {
    reduce(*world, comm, world->rank() == 1 ? "second" : "first", world->rank() == 1 ? 1'000 : 50'000'000);
    std::this_thread::sleep_for(6s);  // rank 1 may get through
    return reduce(*world, comm, "after");
  }
  if (mode == "busy") {  // earlier work keeps the stream longer than the time-out
    fsdpp::cuda::current_stream(world->device()).sleep(3000);
    return reduce(*world, comm, "after long work");
  }
  if (mode == "abort") {
    std::thread killer;
    if (world->rank() == 0)
      killer = std::thread([&comm] {
        std::this_thread::sleep_for(300ms);
        comm.abort("for the test");
      });
    try {
      if (world->rank() == 1) return std::this_thread::sleep_for(3s);
      reduce(*world, comm, "waits");
    } catch (...) {
      if (killer.joinable()) killer.join();
      throw;
    }
  }
  if (mode == "silent") {  // rank 1 stops: alive for the kernel, dead for everybody else
    if (world->rank() == 1) std::raise(SIGSTOP);
    return reduce(*world, comm, "waits for a stopped rank");
  }
  throw std::runtime_error("unknown mode " + mode);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    fsdpp::comm::WorldOptions options;
    options.rendezvous_timeout = std::chrono::milliseconds(argc > 3 ? std::atoi(argv[3]) : 4000);
    options.collective_timeout = std::chrono::milliseconds(argc > 2 ? std::atoi(argv[2]) : 20000);
    if (on_cuda()) {
      options.device = c10::kCUDA;
      options.rendezvous_timeout = 60s;
    }
    run(argc > 1 ? argv[1] : "", World::init(options));
    std::puts("fine");
    return 0;
  } catch (const fsdpp::ConfigError& error) {
    std::printf("ConfigError: %s\n", error.what());
    return 2;
  } catch (const fsdpp::CommError& error) {
    std::printf("CommError %d: %s\n", static_cast<int>(error.code()), error.what());
    return error.code() == fsdpp::CommErrc::InitTimeout ? 3 : 4;
  } catch (const std::exception& error) {
    std::printf("exception: %s\n", error.what());
    return 5;
  }
}
