#pragma once
#include <string>

#include "analysis_schedule.h"

namespace fsdpp::profiler::testing {

/// Three steps of a model of six layers on a pretended H200, in microseconds: gathers ahead that hide but for the
/// first, reductions of which the last is exposed, a late host before the optimizer, a wait for the loader. Names are
/// hostile on purpose.
class Example {
 public:
  explicit Example(int rank = 0, int64_t late_us = 0) : schedule_(0, 40'000'000) {
    Trace& t = schedule_.trace;
    t.rank = rank;
    t.world_size = 2;
    t.host = "node-" + std::to_string(rank);
    t.profile_memory = true;
    t.metadata = {{"model", std::string("minillm <b>6 layers</b>")}, {"batch", int64_t{8}}, {"lr", 0.001}};
    t.devices.push_back({0, "NVIDIA H200", int64_t{141} << 30, 9, 0, 132, 32, 1024, 2048, 65536, 65536, 49152, 233472});
    for (int step = 0; step < 3; ++step) add_step(step, step * 11'000'000 + late_us * 1000 * step);
    t.end_ns = t.steps.back().end_ns;
    t.audit.launches = static_cast<int64_t>(t.kernels.size());
    t.audit.kernels = t.audit.launches;
    t.audit.overhead_ns["CUPTI_BUFFER_FLUSH"] = 120'000;
  }
  [[nodiscard]] const Trace& trace() const { return schedule_.trace; }
  [[nodiscard]] Trace& trace() { return schedule_.trace; }

 private:
  static constexpr int64_t kUs = 1000;
  static constexpr int kLayers = 6;

  void kernel(const std::string& name, int64_t start, int64_t length, int op, int64_t launch, int blocks) {
    Kernel& k = schedule_.trace.kernels[schedule_.kernel(name, start, start + length, launch)];
    k.op = op;
    k.grid[0] = blocks;
    k.block[0] = 256;
    k.registers = 128;
    at_ = start + length;
  }
  int op(const std::string& name, int64_t start, const std::string& shapes, double flops) {
    const int index = schedule_.op(name, start, start + 20 * kUs);
    CpuOp& o = schedule_.trace.cpu_ops[index];
    o.shapes = shapes;
    o.dtypes = "['c10::BFloat16', 'c10::BFloat16']";
    o.flops = flops;
    o.id = static_cast<uint64_t>(index) + 1;
    return index;
  }
  void layer(int i, int64_t launch, bool backward) {
    const int mm = op("aten::mm", launch, "[[8192, 2048], [2048, 8192]]", 2.0 * 8192 * 2048 * 8192);
    const int add = op("aten::add", launch + 30 * kUs, "[[8192, 8192], [8192, 8192]]", 0);
    kernel("nvjet_tst_128x256_64x4_2x1_v_bz_NNT", at_, (backward ? 560 : 370) * kUs, mm, launch, 2048);
    kernel("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>(int, ...)",
           at_, 105 * kUs, add, launch + 30 * kUs, 65536);
    kernel("flash_fwd_kernel</script><script>alert(1)</script>", at_, 90 * kUs, -1, launch + 60 * kUs, 96);
    const std::string unit = "layers." + std::to_string(i);
    if (backward) {
      const int64_t reduced = std::max(reduce_free_, at_);
      schedule_.collective(
          "reduce_scatter", unit,
          schedule_.kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", reduced, reduced + 520 * kUs, launch, 21),
          100 << 20);
      finish_collective();
      reduce_free_ = reduced + 520 * kUs;
    }
  }
  void gather(const std::string& unit, int64_t start, int64_t length, int64_t launch) {
    schedule_.gather(unit, start, start + length, launch);
    finish_collective();
  }
  void finish_collective() {
    Collective& c = schedule_.trace.collectives.back();
    c.comm = "shard";
    c.sequence = sequence_++;
    c.bytes = int64_t{100} << 20;
  }
  void add_step(int step, int64_t start) {
    using Category = MemoryEvent::Category;
    schedule_.scope(trace::Kind::Loader, "next batch", start, start + 400 * kUs);
    at_ = start + 450 * kUs;
    reduce_free_ = 0;
    gather("embed", at_, 300 * kUs, start + 420 * kUs);
    at_ += 300 * kUs;
    for (int i = 0; i < kLayers; ++i) {
      gather("layers." + std::to_string(i), at_ + 50 * kUs, (i == 0 ? 700 : 380) * kUs, start + 500 * kUs);
      memory(at_, 100 + i % 2, int64_t{400} << 20, Category::Gathered, i > 1);
      memory(at_ + 10, 200 + i, int64_t{900} << 20, Category::Activations, false);
      if (i == 0) at_ += 750 * kUs;
      layer(i, start + (600 + 80 * i) * kUs, false);
    }
    for (int i = kLayers - 1; i >= 0; --i) {
      memory(at_, 300 + i, int64_t{200} << 20, Category::Gradients, false);
      layer(i, start + (1200 + 80 * i) * kUs, true);
      memory(at_, 200 + i, -(int64_t{900} << 20), Category::Activations, false);
    }
    at_ = reduce_free_;
    const int64_t late = at_ + 600 * kUs;
    kernel("fsdpp::adamw_kernel", late + 10 * kUs, 280 * kUs, op("fsdpp::adamw", late - 30 * kUs, "", 0), late, 4096);
    for (int i = 0; i < kLayers; ++i) memory(at_ - i, 300 + i, -(int64_t{200} << 20), Category::Gradients, false);
    if (step == 0) memory(start + 1, 1, int64_t{3} << 30, Category::Parameters, false);
    if (step == 0) memory(start + 2, 2, int64_t{6} << 30, Category::Optimizer, false);
    for (int i = 0; i < 2; ++i) memory(at_ - 100, 100 + i, -(int64_t{400} << 20), Category::Gathered, false);
    schedule_.step(step + 5, start, at_ + 50 * kUs);
  }
  void memory(int64_t time, uint64_t address, int64_t bytes, MemoryEvent::Category category, bool again) {
    if (again) return;
    schedule_.memory(time, address, bytes, category, -1);
  }

  Schedule schedule_;
  int64_t at_ = 0;
  int64_t reduce_free_ = 0;
  int64_t sequence_ = 0;
};

}  // namespace fsdpp::profiler::testing
