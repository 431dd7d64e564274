// After test_fully_shard_overlap.py: communication hides behind computation. The CPU's clock proves nothing, so time is virtual
// (support/virtual_time.h) and schedules are exact numbers; and the order of issue is read from the log. That streams of a GPU overlap
// is shown by the profiler's tests there.
#include <torch/csrc/autograd/custom_function.h>

#include "support/virtual_time.h"
#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

using ::testing::ElementsAre;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Time = std::shared_ptr<VirtualTime>;

constexpr int kLayers = 4;
constexpr double kCompute = 10;

/// x · w; forward takes `milliseconds`, backward twice that.
struct TimedMatmul : torch::autograd::Function<TimedMatmul> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w, VirtualTime* time, double milliseconds) {
    trace::Scope scope(trace::Kind::User, "compute");
    context->save_for_backward({x, w});
    context->saved_data["time"] = reinterpret_cast<int64_t>(time);
    context->saved_data["milliseconds"] = 2 * milliseconds;
    time->compute(milliseconds);
    return at::mm(x, w);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    trace::Scope scope(trace::Kind::User, "compute");
    auto saved = context->get_saved_variables();
    reinterpret_cast<VirtualTime*>(context->saved_data["time"].toInt())->compute(context->saved_data["milliseconds"].toDouble());
    return {at::mm(grads[0], saved[1].t()), at::mm(saved[0].t(), grads[0]), at::Tensor(), at::Tensor()};
  }
};

struct LinearWithTimeImpl : torch::nn::Module {
  explicit LinearWithTimeImpl(Time t) : time(std::move(t)) { w = register_parameter("w", at::eye(4)); }
  at::Tensor forward(const at::Tensor& x) { return TimedMatmul::apply(x, w, time.get(), compute).relu(); }
  at::Tensor w;
  Time time;
  double compute = kCompute;
};
FSDPP_MODULE(LinearWithTime);
struct LinearsImpl : torch::nn::Module {
  explicit LinearsImpl(Time time) {
    for (int i = 0; i < kLayers; ++i) layers.push_back(register_module(std::to_string(i), LinearWithTime(time)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& l : layers) x = l(x);
    return x;
  }
  std::vector<LinearWithTime> layers;
};
FSDPP_MODULE(Linears);

struct Durations {
  double forward = 0, backward = 0;
};

/// One model on two ranks, one rank's clock. `prepare` sets the wires' times and may change the units.
Durations time_step(Reshard reshard, const std::function<void(VirtualTime&, Linears&)>& prepare, int replicas = 1) {
  Durations result;
  comm::run_local_world(2 * replicas, [&](std::shared_ptr<World> inner) {
    auto world = std::make_shared<TimedWorld>(std::move(inner));
    auto mesh = Mesh::hybrid(world, replicas);
    Linears model(world->time);
    for (auto& l : model->layers) fully_shard(l, mesh, {.reshard_after_forward = reshard});
    fully_shard(model, mesh, {.reshard_after_forward = reshard});
    auto x = at::ones({2, 4});
    model(x).sum().backward();  // the order becomes known
    auto& time = *world->time;
    prepare(time, model);
    double begin = time.now;
    auto loss = model(x).sum();
    double middle = time.now;
    loss.backward();
    if (world->rank() == 0) result = {middle - begin, time.now - middle};
  });
  return result;
}

/// What a schedule without overlap takes: everything one after the other.
double serial_forward(double gather) { return kLayers * (gather + kCompute); }
double serial_backward(double gather, double reduce) { return kLayers * (gather + 2 * kCompute + reduce); }

TEST(Overlap, FullyShardTrainingOverlap) {
  auto got = time_step(true, [](VirtualTime& time, Linears&) { time.gather = 4, time.reduce = 6; });
  EXPECT_EQ(got.forward, 4 + kLayers * kCompute) << "only the first gather is waited for";
  EXPECT_EQ(got.backward, 4 + kLayers * 2 * kCompute + 6) << "and in backward the last reduction";
  EXPECT_LT(got.forward, serial_forward(4));
  EXPECT_LT(got.backward, serial_backward(4, 6));
}

TEST(Overlap, ASlowWireIsNeverIdleWhileGatheringAhead) {
  auto got = time_step(true, [](VirtualTime& time, Linears&) { time.gather = 15; });
  EXPECT_EQ(got.forward, kLayers * 15 + kCompute);
}

TEST(Overlap, UnitsKeptGatheredWaitForNoGatherInBackward) {
  auto got = time_step(false, [](VirtualTime& time, Linears&) { time.gather = 4, time.reduce = 6; });
  EXPECT_EQ(got.forward, 4 + kLayers * kCompute);
  EXPECT_EQ(got.backward, kLayers * 2 * kCompute + 6);
}

// The checker of this file: a step in which nothing is gathered ahead is as slow as the serial schedule says.
TEST(Overlap, WithoutGatheringAheadTheTimeIsSerial) {
  auto got = time_step(true, [](VirtualTime& time, Linears& model) {
    time.gather = 4;
    for (auto& l : model->layers) unit_of(*l).set_modules_to_forward_prefetch({unit_of(*l)});
    unit_of(*model).set_modules_to_forward_prefetch({unit_of(*model)});
  });
  EXPECT_EQ(got.forward, serial_forward(4));
}

// Gathers and reductions have a communicator each by default. On one wire a gather queues behind the reduction issued before it.
TEST(Overlap, SetSeparateReduceScatterGroup) {
  auto run = [](bool one_wire) {
    return time_step(true, [&](VirtualTime& time, Linears&) { time.gather = time.reduce = 15, time.one_wire = one_wire; });
  };
  EXPECT_EQ(run(false).backward, 15 + kLayers * 2 * kCompute + 15);
  EXPECT_GT(run(true).backward, run(false).backward + (kLayers - 2) * 5);
}

TEST(Overlap, BackwardCommOverlap) {
  auto got = time_step(true, [](VirtualTime& time, Linears&) { time.gather = time.reduce = 20; });
  EXPECT_EQ(got.backward, 20 + kLayers * 2 * kCompute + 20) << "gathers and reductions as long as the computation still hide";
}

// A reduction is on its way while the next gradients are packed: one that takes longer than a layer's backward delays by the difference.
TEST(Overlap, SlowReductionsBoundTheBackward) {
  auto got = time_step(false, [](VirtualTime& time, Linears&) { time.reduce = 30; });
  EXPECT_EQ(got.backward, 2 * kCompute + kLayers * 30);
}

// Three layers whose backward takes no time, then a long one: with more reductions in flight it starts earlier.
TEST(Overlap, SetReduceScatterMaxInputBuffers) {
  for (auto [count, want] : {std::pair{1, 180.0}, {2, 150.0}, {3, 120.0}}) {
    auto got = time_step(false, [count = count](VirtualTime& time, Linears& model) {
      time.reduce = 30;
      for (auto& l : model->layers) l->compute = 0;
      model->layers[0]->compute = 45;
      unit_of(*model->layers[1]).set_reduce_scatter_max_input_buffers(1);
      unit_of(*model->layers[2]).set_reduce_scatter_max_input_buffers(count);  // the largest holds for all
      unit_of(*model->layers[3]).set_reduce_scatter_max_input_buffers(1);
    });
    EXPECT_EQ(got.backward, want) << count << " in flight";
  }
}

// -- order of issue ------------------------------------------------------------------------------------------------------

TEST(Overlap, OrderOfIssue) {
  comm::run_local_world(2, [](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    Linears model(std::make_shared<VirtualTime>());
    for (auto& l : model->layers) fully_shard(l, mesh, {.reshard_after_forward = true});
    model(at::ones({2, 4})).sum().backward();  // each layer is its own root
    fully_shard(model, mesh, {.reshard_after_forward = true});
    model(at::ones({2, 4})).sum().backward();
    EventLog log(EventLog::What::Hooks);
    auto issued = [&] {
      std::vector<std::string> order;
      for (auto& e : log.take())
        if (e == "+User compute" || e.starts_with("+Unshard ") || e.starts_with("+Reduce")) order.push_back(e.substr(e.find_first_of("UR")));
      return order;
    };
    auto loss = model(at::ones({2, 4})).sum();
    EXPECT_THAT(issued(), ElementsAre("Unshard 0", "Unshard 1", "User compute", "Unshard 2", "User compute", "Unshard 3", "User compute", "User compute"));
    loss.backward();
    EXPECT_THAT(issued(), ElementsAre("Unshard 3", "Unshard 2", "User compute", "Reduce 3", "Unshard 1", "User compute", "Reduce 2", "Unshard 0", "User compute",
                                      "Reduce 1", "User compute", "Reduce 0"));
  });
}

}  // namespace
}  // namespace fsdpp::test::suite
