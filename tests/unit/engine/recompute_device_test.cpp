// fsdpp::checkpoint where backward runs on threads of devices, as with CUDA, but of a device that anyone has: host memory that
// says it is somewhere else.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <mutex>
#include <set>
#include <thread>

#include "fsdpp/api/checkpoint.h"

namespace fsdpp::test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

C10_REGISTER_GUARD_IMPL(XLA, c10::impl::FakeGuardImpl<c10::DeviceType::XLA>);

at::Tensor relabelled(const at::Tensor& t, c10::Device device) {
  const auto options = t.options().device(device);
  return at::for_blob(t.data_ptr(), t.sizes()).deleter([t](void*) {}).options(options).target_device(device).make_tensor();
}
at::Tensor on_device(const at::Tensor& t) { return relabelled(t, {c10::kXLA, 3}); }
at::Tensor on_host(const at::Tensor& t) { return relabelled(t, c10::kCPU); }

std::mutex seen_mutex;
std::set<std::thread::id> seen;  // threads of Square::backward

/// The square of a tensor of the host, on the device: its node belongs to the device's thread.
struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return on_device(at::mul(x, x));
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    {
      std::lock_guard lock(seen_mutex);
      seen.insert(std::this_thread::get_id());
    }
    return {at::mul(on_host(grads[0]), ctx->get_saved_variables()[0]).mul(2)};
  }
};
struct ToHost : torch::autograd::Function<ToHost> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& y) { return on_host(y); }
  static variable_list backward(AutogradContext*, variable_list grads) { return {on_device(grads[0])}; }
};

at::Tensor squared(const at::Tensor& x) { return ToHost::apply(Square::apply(x)); }

at::Tensor gradient(const at::Tensor& y, const at::Tensor& x) {
  return torch::autograd::grad({y}, {x}, {at::ones_like(y)}, /*retain_graph=*/true)[0];
}

TEST(CheckpointOnADevice, AfterAPlainBackwardThenTheSameDeviceThreadRunsIt) {
  auto x = at::rand({5}).requires_grad_();
  const at::Tensor plain = gradient(squared(x), x);  // starts the threads of devices
  const auto threads = seen;
  ASSERT_EQ(threads.size(), 1u);
  EXPECT_NE(*threads.begin(), std::this_thread::get_id());
  int runs = 0;
  auto y = checkpoint([&](const at::Tensor& in) { return ++runs, squared(in); }, x);
  EXPECT_TRUE(at::equal(gradient(y, x), plain));
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(seen, threads);
  EXPECT_TRUE(at::equal(gradient(squared(x), x), plain));
}

/// A backward inside a backward returns to the thread that started it, however deep: a device's own or one of the engine's pool.
TEST(CheckpointOnADevice, InsideABackwardOfManyLevelsThenItsGradient) {
  struct Nested : torch::autograd::Function<Nested> {
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, int64_t depth) {
      ctx->saved_data["depth"] = depth;
      ctx->save_for_backward({x});
      return on_device(x.clone());
    }
    static variable_list backward(AutogradContext* ctx, variable_list grads) {
      const int64_t depth = ctx->saved_data["depth"].toInt();
      const at::AutoGradMode with_grad(true);
      auto x = ctx->get_saved_variables()[0].detach().requires_grad_();
      auto y = depth == 0 ? checkpoint(squared, x) : ToHost::apply(Nested::apply(x, depth - 1));
      return {at::mul(on_host(grads[0]), gradient(y, x)), at::Tensor()};
    }
  };
  auto x = at::rand({5}).requires_grad_();
  auto y = checkpoint([](const at::Tensor& in) { return ToHost::apply(Nested::apply(in, 70)); }, x);
  EXPECT_TRUE(at::equal(gradient(y, x), x.mul(2)));
}

}  // namespace
}  // namespace fsdpp::test
