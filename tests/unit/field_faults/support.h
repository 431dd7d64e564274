#pragma once
/// What the cases of known field faults share: ranks under a watchdog, exact comparisons, and the check that nothing of a unit
/// is left unsharded after a backward.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/registry.h"
#include "engine/unit.h"
#include "fsdpp/api/fully_shard.h"
#include "fsdpp/checkpoint/full_state.h"
#include "fsdpp/comm/world.h"

namespace fsdpp::test {

namespace full_state = fsdpp::dcp;  // save_full, load_full, LoadResult
using comm::Mesh;
using comm::World;
using RankBody = std::function<void(std::shared_ptr<World>)>;

/// Ends the program, naming the case, if it lives for 60 s: a hang is a failure that must not wait for somebody.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds limit = std::chrono::seconds(60)) : thread_([this, limit] { watch(limit); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch(std::chrono::seconds limit) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, limit, [this] { return done_; })) return;
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    std::fprintf(stderr, "watchdog: %s did not end within %lld s\n", test ? test->name() : "a case",
                 static_cast<long long>(limit.count()));
    std::_Exit(1);
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

/// Runs `body` on `ranks` threads under a watchdog; a collective that waits for 20 s is an error. Rethrows the first failure.
inline void each_rank(int ranks, const RankBody& body, comm::LocalWorldOptions options = {}) {
  const Watchdog watchdog;
  options.collective_timeout = std::chrono::seconds(20);
  comm::run_local_world(ranks, body, options);
}

/// Options for each_rank() with which `count` counts the operations `op` of all ranks on the wire.
inline comm::LocalWorldOptions count_operations(std::string op, std::atomic<int>& count) {
  comm::LocalWorldOptions options;
  options.on_operation = [op = std::move(op), &count](const comm::OperationEvent& event) {
    if (event.op == op) ++count;
    return comm::Fault::None;
  };
  return options;
}

/// Runs `body` as each_rank does (or as `run(ranks, body)` does) and returns what each rank ended with: the message of its
/// exception, or "" if it had none. A rank that fails is no news to the others but through their communicators.
template <class Run>
std::vector<std::string> verdicts(int ranks, const RankBody& body, Run run) {
  std::vector<std::string> messages(static_cast<size_t>(ranks));
  run(ranks, [&](std::shared_ptr<World> world) {
    try {
      body(world);
    } catch (const std::exception& e) {
      messages[static_cast<size_t>(world->rank())] = *e.what() ? e.what() : "an exception without a message";
    }
  });
  return messages;
}
inline std::vector<std::string> verdicts(int ranks, const RankBody& body) {
  return verdicts(ranks, body, [](int n, const RankBody& b) { each_rank(n, b); });
}

/// Mean over the ranks of r + 1: 1.5 on two ranks, 2.5 on four, 1 on one.
inline double mean_weight(int ranks) { return (ranks + 1) / 2.0; }

/// The global gradient of a sharded parameter. Collective.
inline at::Tensor full_grad(const at::Tensor& parameter) {
  return shard::full_tensor(sharding_of(parameter), parameter.grad());
}

/// Every element equals `value`, bit for bit.
inline ::testing::AssertionResult all_equal(const at::Tensor& t, double value) {
  if (t.numel() > 0 && at::equal(t, at::full_like(t, value))) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << t << "\nexpected " << value << " everywhere";
}
inline ::testing::AssertionResult same_values(const at::Tensor& t, const at::Tensor& expected) {
  if (t.sizes() == expected.sizes() && at::equal(t, expected.to(t.scalar_type()))) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << t << "\nexpected\n" << expected;
}
/// Within 1e-6.
inline ::testing::AssertionResult all_near(const at::Tensor& t, const at::Tensor& expected) {
  const auto want = expected.to(at::kDouble).expand(t.sizes());
  if (t.numel() > 0 && at::allclose(t.detach().to(at::kDouble), want, 0, 1e-6)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << t << "\nexpected\n" << expected;
}
inline ::testing::AssertionResult all_near(const at::Tensor& t, double value) {
  return all_near(t, at::scalar_tensor(value, at::kDouble));
}

/// Whether every unit at or below `module` is sharded and holds no unsharded bytes: no gathered memory, no gradient buffer, no
/// gradient of global shape.
inline ::testing::AssertionResult nothing_unsharded(const torch::nn::Module& module) {
  auto found = units(module);
  if (found.empty()) return ::testing::AssertionFailure() << "no unit at or below the module";
  std::vector<std::shared_ptr<torch::nn::Module>> modules = module.modules(/*include_self=*/false);
  std::vector<const torch::nn::Module*> all{&module};
  for (const auto& m : modules) all.push_back(m.get());
  for (const auto* m : all) {
    auto unit = engine::find_unit(m);
    if (!unit) continue;
    if (unit->state() != engine::UnitState::Sharded)
      return ::testing::AssertionFailure() << "unit '" << unit->name() << "' is not sharded";
    for (const auto& b : unit->buffers()) {
      const auto* storage = static_cast<const c10::StorageImpl*>(b->gathered_storage());
      if (!b->aliased() && storage->data() != nullptr)
        return ::testing::AssertionFailure() << "unit '" << unit->name() << "' holds gathered memory";
      if (b->has_unsharded_grads() || b->has_accumulated() || b->has_group_piece())
        return ::testing::AssertionFailure() << "unit '" << unit->name() << "' holds unsharded gradients or pieces";
    }
  }
  return ::testing::AssertionSuccess();
}

/// One parameter `w`; forward gives its sum.
struct SumImpl : torch::nn::Module {
  explicit SumImpl(at::Tensor value) { w = register_parameter("w", std::move(value)); }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w;
};
FSDPP_MODULE(Sum);

/// One matrix `w`; forward gives w · x.
struct MatrixImpl : torch::nn::Module {
  explicit MatrixImpl(at::Tensor value) { w = register_parameter("w", std::move(value)); }
  at::Tensor forward(const at::Tensor& x) { return at::mv(w, x); }
  at::Tensor w;
};
FSDPP_MODULE(Matrix);

/// A fresh folder, removed with all it holds at the end.
class TempFolder {
 public:
  TempFolder() {
    static std::atomic<int> count{0};
    path_ =
        std::filesystem::temp_directory_path() / ("fsdpp_fault_" + std::to_string(::getpid()) + "_" + std::to_string(count++));
    std::filesystem::create_directories(path_);
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  [[nodiscard]] std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace fsdpp::test
