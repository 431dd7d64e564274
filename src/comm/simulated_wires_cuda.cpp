#include <cuda_runtime_api.h>

#include <cmath>

#include "base/enforce.h"
#include "comm/simulated_wires.h"
#include "cuda/check.h"
#include "cuda/device_bytes.h"
#include "cuda/wire.h"
#include "fsdpp/cuda/stream.h"

namespace fsdpp::comm {
namespace {

class StreamTicket final : public Ticket::State {
 public:
  StreamTicket(cuda::StreamView stream, std::shared_ptr<Failure> failure)
      : captured_(stream.is_capturing()), failure_(std::move(failure)) {
    end_.record(stream);
  }
  bool query() const override {
    check_host_use("query()");
    return end_.query();
  }
  void wait(cuda::StreamView stream) const override {
    failure_->check();
    stream.wait(end_);
  }
  void wait_host() const override {
    check_host_use("wait_host()");
    end_.synchronize();
  }

 private:
  void check_host_use(const char* what) const {
    failure_->check();
    FSDPP_ENFORCE(!captured_, UsageError,
                  "{} of an operation in a CUDA graph. Try: wait() on a stream, inside the capture", what);
  }

  cuda::Event end_;
  bool captured_;
  std::shared_ptr<Failure> failure_;
};

class DeviceWires final : public SimulatedWires {
 public:
  explicit DeviceWires(c10::Device device) : memory_(device, sizeof(cuda::WireState)) { set_delays(true); }

  int add_user() override {
    FSDPP_ENFORCE(users_ < cuda::WireState::kUsers, ConfigError,
                  "SimulatedWorld: expected at most {} communicators on CUDA", cuda::WireState::kUsers);
    return users_++;
  }
  Ticket carry(const Load& load, cuda::StreamView stream, std::shared_ptr<Failure> failure) override {
    const cuda::WireLoad on_device{static_cast<int>(load.wire), load.user, static_cast<unsigned long long>(load.bytes),
                                   static_cast<unsigned long long>(std::llround(load.seconds * 1e9))};
    FSDPP_CUDA_CHECK(static_cast<cudaError_t>(cuda::launch_wire(state(), on_device, stream.handle())));
    return after(stream, std::move(failure));
  }
  Ticket after(cuda::StreamView stream, std::shared_ptr<Failure> failure) override {
    return Ticket(std::make_shared<StreamTicket>(stream, std::move(failure)));
  }
  void set_delays(bool on) override {
    const unsigned long long flag = on ? 1 : 0;
    FSDPP_CUDA_CHECK(cudaDeviceSynchronize());
    FSDPP_CUDA_CHECK(cudaMemcpy(&state()->delays, &flag, sizeof(flag), cudaMemcpyHostToDevice));
  }
  FabricUse use(int user) const override {
    cuda::WireState::Use use{};
    FSDPP_CUDA_CHECK(cudaDeviceSynchronize());
    FSDPP_CUDA_CHECK(cudaMemcpy(&use, &state()->use[user], sizeof(use), cudaMemcpyDeviceToHost));
    return {static_cast<int64_t>(use.operations), static_cast<int64_t>(use.bytes),
            static_cast<double>(use.nanoseconds) * 1e-9};
  }
  void reset_use() override {
    FSDPP_CUDA_CHECK(cudaDeviceSynchronize());
    FSDPP_CUDA_CHECK(cudaMemset(state()->use, 0, sizeof(state()->use)));
  }

 private:
  [[nodiscard]] cuda::WireState* state() const noexcept { return static_cast<cuda::WireState*>(memory_.data()); }

  cuda::DeviceBytes memory_;
  int users_ = 0;
};

}  // namespace

std::shared_ptr<SimulatedWires> make_device_wires(c10::Device device) { return std::make_shared<DeviceWires>(device); }

}  // namespace fsdpp::comm
