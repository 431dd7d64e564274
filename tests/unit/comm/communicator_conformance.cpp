#include "unit/comm/communicator_conformance.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/buffers.h"

namespace fsdpp::test {
namespace {

using at::Tensor;
using c10::ScalarType;
using comm::Buffer;
using comm::Communicator;
using comm::ConstBuffer;
using comm::ReduceOp;
using comm::Ticket;
using comm::World;

const std::vector<ScalarType> kReducible = {ScalarType::Float,    ScalarType::Double, ScalarType::Half,
                                            ScalarType::BFloat16, ScalarType::Byte,   ScalarType::Char,
                                            ScalarType::Int,      ScalarType::Long};
const std::vector<int64_t> kSizes = {0, 1, 3, 129, 4099};

std::vector<ScalarType> movable() {
  auto types = kReducible;
  types.push_back(ScalarType::Bool);
  return types;
}

Buffer whole(const Tensor& t) { return {t.data_ptr(), t.numel(), t.scalar_type()}; }
ConstBuffer readable(const Tensor& t) { return {t.data_ptr(), t.numel(), t.scalar_type()}; }

/// Small whole numbers, exact in every dtype with sums of up to eight ranks; different on every rank.
Tensor pattern(int rank, int64_t count, ScalarType dtype) {
  const Tensor values = at::remainder(at::arange(count, at::kLong).mul(3).add(rank * 7), 5);
  return dtype == ScalarType::Bool ? values.gt(1) : values.to(dtype);
}

struct Rig {
  explicit Rig(World& w, const std::string& name)
      : world(w), comm(w.make_communicator(name)), stream(cuda::current_stream(w.device())) {}
  [[nodiscard]] int rank() const { return comm->rank(); }
  [[nodiscard]] int size() const { return comm->size(); }
  [[nodiscard]] Tensor mine(int64_t count, ScalarType dtype) const {
    return pattern(rank(), count, dtype).to(world.device());
  }
  [[nodiscard]] Tensor blank(int64_t count, ScalarType dtype) const {
    return at::full({count}, 1, at::device(world.device()).dtype(dtype));
  }
  [[nodiscard]] Tensor result(const Ticket& ticket, const Tensor& t) const {
    ticket.wait(stream);
    return t.cpu();
  }

  World& world;
  std::shared_ptr<Communicator> comm;
  cuda::StreamView stream;
};

Tensor everyone(int size, int64_t count, ScalarType dtype) {
  std::vector<Tensor> parts;
  for (int r = 0; r < size; ++r) parts.push_back(pattern(r, count, dtype));
  return at::cat(parts);
}

Tensor reduced(int size, int64_t count, ScalarType dtype, ReduceOp op) {
  std::vector<Tensor> parts;
  for (int r = 0; r < size; ++r) parts.push_back(pattern(r, count, ScalarType::Long));
  const Tensor all = at::stack(parts);
  if (op == ReduceOp::Sum) return all.sum(0).to(dtype);
  return (op == ReduceOp::Max ? all.amax(0) : all.amin(0)).to(dtype);
}

void all_gather(World& world) {
  Rig rig(world, "all_gather");
  for (auto dtype : movable())
    for (auto count : kSizes) {
      const Tensor in = rig.mine(count, dtype), out = rig.blank(count * rig.size(), dtype);
      EXPECT_TRUE(at::equal(rig.result(rig.comm->all_gather(whole(out), readable(in), rig.stream), out),
                            everyone(rig.size(), count, dtype)))
          << c10::toString(dtype) << " " << count;
    }
}

void all_gather_in_place(World& world) {
  Rig rig(world, "all_gather_in_place");
  for (auto count : kSizes) {
    const Tensor out = rig.blank(count * rig.size(), ScalarType::BFloat16);
    const Tensor in = out.narrow(0, rig.rank() * count, count);
    in.copy_(rig.mine(count, ScalarType::BFloat16));
    EXPECT_TRUE(at::equal(rig.result(rig.comm->all_gather(whole(out), readable(in), rig.stream), out),
                          everyone(rig.size(), count, ScalarType::BFloat16)))
        << count;
  }
}

void reduce_scatter(World& world) {
  Rig rig(world, "reduce_scatter");
  for (auto dtype : kReducible)
    for (auto op : {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min})
      for (auto count : kSizes) {
        const Tensor in = rig.mine(count * rig.size(), dtype), out = rig.blank(count, dtype);
        const Tensor want = reduced(rig.size(), count * rig.size(), dtype, op).narrow(0, rig.rank() * count, count);
        EXPECT_TRUE(
            at::equal(rig.result(rig.comm->reduce_scatter(whole(out), readable(in), op, rig.stream), out), want))
            << c10::toString(dtype) << " " << count << " op " << static_cast<int>(op);
      }
}

void reduce_scatter_in_place(World& world) {
  Rig rig(world, "reduce_scatter_in_place");
  for (auto dtype : {ScalarType::Float, ScalarType::BFloat16})
    for (auto count : kSizes) {
      const Tensor in = rig.mine(count * rig.size(), dtype);
      const Tensor out = in.narrow(0, rig.rank() * count, count);
      const Tensor want =
          reduced(rig.size(), count * rig.size(), dtype, ReduceOp::Sum).narrow(0, rig.rank() * count, count);
      EXPECT_TRUE(at::equal(
          rig.result(rig.comm->reduce_scatter(whole(out), readable(in), ReduceOp::Sum, rig.stream), out), want))
          << c10::toString(dtype) << " " << count;
    }
}

void all_reduce(World& world) {
  Rig rig(world, "all_reduce");
  for (auto dtype : kReducible)
    for (auto op : {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min})
      for (int64_t count : {0, 1, 3, 129, 20011}) {
        const Tensor in = rig.mine(count, dtype), out = rig.blank(count, dtype);
        const Tensor want = reduced(rig.size(), count, dtype, op);
        EXPECT_TRUE(at::equal(rig.result(rig.comm->all_reduce(whole(out), readable(in), op, rig.stream), out), want))
            << c10::toString(dtype) << " " << count << " op " << static_cast<int>(op);
        EXPECT_TRUE(at::equal(in.cpu(), pattern(rig.rank(), count, dtype))) << "the input must stay as it was";
        EXPECT_TRUE(at::equal(rig.result(rig.comm->all_reduce(whole(in), readable(in), op, rig.stream), in), want))
            << "in place " << c10::toString(dtype) << " " << count << " op " << static_cast<int>(op);
      }
}

void broadcast(World& world) {
  Rig rig(world, "broadcast");
  for (auto dtype : movable())
    for (int root = 0; root < rig.size(); ++root) {
      const Tensor data = rig.mine(37, dtype);
      EXPECT_TRUE(
          at::equal(rig.result(rig.comm->broadcast(whole(data), root, rig.stream), data), pattern(root, 37, dtype)))
          << c10::toString(dtype) << " root " << root;
    }
}

void all_to_all(World& world) {
  Rig rig(world, "all_to_all");
  for (auto dtype : movable())
    for (auto count : kSizes) {
      const Tensor in = rig.mine(count * rig.size(), dtype), out = rig.blank(count * rig.size(), dtype);
      std::vector<Tensor> want;
      for (int r = 0; r < rig.size(); ++r)
        want.push_back(pattern(r, count * rig.size(), dtype).narrow(0, rig.rank() * count, count));
      EXPECT_TRUE(at::equal(rig.result(rig.comm->all_to_all(whole(out), readable(in), rig.stream), out), at::cat(want)))
          << c10::toString(dtype) << " " << count;
    }
}

void queued_back_to_back(World& world) {
  Rig rig(world, "queue");
  constexpr int64_t kCount = 513;
  const Tensor shard = rig.mine(kCount, ScalarType::Float), full = rig.blank(kCount * rig.size(), ScalarType::Float);
  Ticket last;
  for (int i = 0; i < 20; ++i) {  // each operation reads what the one before wrote
    (void)rig.comm->all_gather(whole(full), readable(shard), rig.stream);
    last = rig.comm->reduce_scatter(whole(shard), readable(full), ReduceOp::Max, rig.stream);
  }
  EXPECT_TRUE(at::equal(rig.result(last, shard), pattern(rig.rank(), kCount, ScalarType::Float)));
  last.wait_host();
  EXPECT_TRUE(last.query());
}

void groups(World& world) {
  Rig rig(world, "group");
  const Tensor a = rig.mine(100, ScalarType::Float), b = rig.mine(7, ScalarType::BFloat16);
  const Tensor all_a = rig.blank(100 * rig.size(), ScalarType::Float),
               all_b = rig.blank(7 * rig.size(), ScalarType::BFloat16);
  comm::Group group(*rig.comm);
  EXPECT_TRUE(rig.comm->all_gather(whole(all_a), readable(a), rig.stream).query())
      << "a ticket inside a group is empty";
  (void)rig.comm->all_gather(whole(all_b), readable(b), rig.stream);
  const Ticket ticket = group.finish();
  EXPECT_TRUE(at::equal(rig.result(ticket, all_a), everyone(rig.size(), 100, ScalarType::Float)));
  EXPECT_TRUE(at::equal(all_b.cpu(), everyone(rig.size(), 7, ScalarType::BFloat16)));
}

void group_left_by_exception(World& world) {
  Rig rig(world, "group_exception");
  try {
    comm::Group group(*rig.comm);
    throw std::runtime_error("user code");
  } catch (const std::runtime_error&) {
  }
  const Tensor data = rig.mine(5, ScalarType::Float);  // the group is closed, so this is no part of it
  EXPECT_TRUE(
      at::equal(rig.result(rig.comm->broadcast(whole(data), 0, rig.stream), data), pattern(0, 5, ScalarType::Float)));
}

void two_communicators(World& world) {
  Rig gather(world, "pair.a"), reduce(world, "pair.b");
  const Tensor shard = gather.mine(1000, ScalarType::Float),
               full = gather.blank(1000 * gather.size(), ScalarType::Float);
  const Tensor grad = gather.mine(1000 * gather.size(), ScalarType::Float),
               mine = gather.blank(1000, ScalarType::Float);
  for (int i = 0; i < 10; ++i) {
    const Ticket a = gather.comm->all_gather(whole(full), readable(shard), gather.stream);
    const Ticket b = reduce.comm->reduce_scatter(whole(mine), readable(grad), ReduceOp::Sum, reduce.stream);
    b.wait_host();
    a.wait_host();
  }
  EXPECT_TRUE(at::equal(full.cpu(), everyone(gather.size(), 1000, ScalarType::Float)));
  EXPECT_TRUE(at::equal(mine.cpu(), reduced(gather.size(), 1000 * gather.size(), ScalarType::Float, ReduceOp::Sum)
                                        .narrow(0, gather.rank() * 1000, 1000)));
}

void subgroups(World& world) {
  // Even and odd world ranks apart, under one name.
  std::vector<int> ranks;
  for (int r = world.rank() % 2; r < world.size(); r += 2) ranks.push_back(r);
  auto comm = world.make_communicator("parity", ranks);
  ASSERT_EQ(comm->size(), static_cast<int>(ranks.size()));
  const Tensor value = at::full({1}, world.rank(), at::device(world.device()).dtype(at::kInt));
  const Tensor all = at::zeros({comm->size()}, value.options());
  comm->all_gather(whole(all), readable(value), cuda::current_stream(world.device()))
      .wait(cuda::current_stream(world.device()));
  const Tensor host = all.cpu();
  for (size_t i = 0; i < ranks.size(); ++i) EXPECT_EQ(host[static_cast<int64_t>(i)].item<int>(), ranks[i]);
}

void name_used_again(World& world) {
  for (int i = 0; i < 3; ++i) {
    Rig rig(world, "again");
    rig.comm->barrier();
  }
}

void barrier_waits(World& world) {
  Rig rig(world, "barrier");
  for (int late = 0; late < rig.size(); ++late) {
    const auto key = "barrier_waits/" + std::to_string(late);
    if (rig.rank() == late) {
      cuda::StreamView().sleep(30);
      world.store().set(key, "here");
    }
    rig.comm->barrier({.label = "conformance"});
    EXPECT_TRUE(world.store().try_get(key).has_value()) << "left before rank " << late << " came";
    rig.comm->barrier();
  }
  world.barrier();
}

// In place and out of place, again and again in the same buffers; other buffers come and go in between.
void allocated(World& world) {
  Rig rig(world, "allocated");
  constexpr int64_t kCount = 4104;  // 16 bytes divide it in every type
  const Tensor gathered = comm::allocate_tensor(*rig.comm, {kCount * rig.size()}, ScalarType::BFloat16, "gathered");
  const Tensor sums = comm::allocate_tensor(*rig.comm, {kCount * rig.size()}, ScalarType::Float, "sums");
  const Tensor shard = gathered.narrow(0, rig.rank() * kCount, kCount), slice = sums.narrow(0, rig.rank() * kCount, kCount);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(gathered.data_ptr()) % 64, 0);
  const Tensor sum = reduced(rig.size(), kCount * rig.size(), ScalarType::Float, ReduceOp::Sum).narrow(0, rig.rank() * kCount, kCount);
  for (int i = 0; i < 3; ++i) {
    const Tensor brief = comm::allocate_tensor(*rig.comm, {100 + i}, ScalarType::Float, "brief");
    gathered.zero_();
    shard.copy_(rig.mine(kCount, ScalarType::BFloat16));
    EXPECT_TRUE(at::equal(rig.result(rig.comm->all_gather(whole(gathered), readable(shard), rig.stream), gathered),
                          everyone(rig.size(), kCount, ScalarType::BFloat16)));
    sums.copy_(rig.mine(kCount * rig.size(), ScalarType::Float));
    EXPECT_TRUE(at::equal(rig.result(rig.comm->reduce_scatter(whole(slice), readable(sums), ReduceOp::Sum, rig.stream), slice), sum));
    const Tensor out = rig.blank(kCount, ScalarType::Float);
    sums.copy_(rig.mine(kCount * rig.size(), ScalarType::Float));
    EXPECT_TRUE(at::equal(rig.result(rig.comm->reduce_scatter(whole(out), readable(sums), ReduceOp::Sum, rig.stream), out), sum));
    brief.fill_(1);
    EXPECT_TRUE(at::equal(rig.result(rig.comm->all_reduce(whole(brief), readable(brief), ReduceOp::Sum, rig.stream), brief),
                          at::full({100 + i}, rig.size(), ScalarType::Float)));
  }
}

void allocated_differently(World& world) {
  Rig rig(world, "allocated_differently");
  if (rig.size() == 1) return;
  try {
    (void)rig.comm->allocate(rig.rank() == 0 ? 4096 : 8192, {.label = "slot"});
    ADD_FAILURE() << "different sizes were taken";
  } catch (const CommError& error) {
    EXPECT_EQ(error.code(), CommErrc::Mismatch);
    EXPECT_NE(std::string(error.what()).find("4096 on rank 0, 8192 on rank"), std::string::npos) << error.what();
  }
  rig.comm->barrier();  // a caller's mistake does not break the communicator
}

void wrong_arguments(World& world) {
  Rig rig(world, "arguments");
  const Tensor in = rig.mine(8, ScalarType::Float), out = rig.blank(8 * rig.size() + 1, ScalarType::Float);
  EXPECT_THROW((void)rig.comm->all_gather(whole(out), readable(in), rig.stream), UsageError);
  const Tensor other = rig.blank(8 * rig.size(), ScalarType::Double);
  EXPECT_THROW((void)rig.comm->all_gather(whole(other), readable(in), rig.stream), UsageError);
  const Tensor truth = rig.mine(8, ScalarType::Bool);
  EXPECT_THROW((void)rig.comm->all_reduce(whole(truth), readable(truth), ReduceOp::Sum, rig.stream), UsageError);
  EXPECT_THROW((void)rig.comm->broadcast(whole(in), rig.size(), rig.stream), UsageError);
  EXPECT_THROW((void)rig.comm->all_to_all(whole(in), readable(in), rig.stream), UsageError) << "in place";
  EXPECT_THROW((void)rig.comm->group_end(), UsageError);
  if (rig.size() > 1) {
    const Tensor full = rig.blank(8 * rig.size(), ScalarType::Float);
    const Tensor wrong = full.narrow(0, ((rig.rank() + 1) % rig.size()) * 8, 8);
    EXPECT_THROW((void)rig.comm->all_gather(whole(full), readable(wrong), rig.stream), UsageError)
        << "another rank's place";
  }
  rig.comm->barrier();  // a caller's mistake does not break the communicator
}

void aborted(World& world) {
  auto comm = world.make_communicator("aborted");
  comm->barrier();
  world.barrier();  // a rank that still waits in the first barrier would hear of the abort there
  comm->abort("for the test");
  comm->abort("a second time");
  const Tensor data = at::zeros({3}, at::device(world.device()).dtype(at::kFloat));
  for (int i = 0; i < 2; ++i) {
    try {
      (void)comm->broadcast(whole(data), 0, cuda::current_stream(world.device()));
      ADD_FAILURE() << "an aborted communicator took an operation";
    } catch (const CommError& error) {
      EXPECT_EQ(error.code(), CommErrc::Aborted);
      EXPECT_NE(std::string(error.what()).find("for the test"), std::string::npos) << error.what();
    }
  }
}

// 1 + 2^-9 · k is lost in bf16 but not in fp32: 2^-8 is half a bf16 step at 1.
void sixteen_bit_sums(World& world) {
  Rig rig(world, "sixteen_bit");
  for (auto dtype : {ScalarType::BFloat16, ScalarType::Half}) {
    const double tiny = dtype == ScalarType::BFloat16 ? 0x1p-9 : 0x1p-12;
    const Tensor in = at::full({65}, rig.rank() == 0 ? 1.0 : tiny, at::dtype(dtype)),
                 out = at::empty({65}, at::dtype(dtype));
    const float sum = 1.0F + static_cast<float>(tiny) * static_cast<float>(rig.size() - 1);
    const Tensor want = at::full({65}, sum, at::dtype(at::kFloat)).to(dtype);
    EXPECT_TRUE(
        at::equal(rig.result(rig.comm->all_reduce(whole(out), readable(in), ReduceOp::Sum, rig.stream), out), want));
  }
}

void fixed_order(World& world) {
  Rig rig(world, "fixed_order");
  constexpr int64_t kCount = 30011;  // beyond the one-exchange size, and odd
  const Tensor values = at::arange(kCount, at::kFloat).mul(0.37F).add(rig.rank() * 1.1F).sin();
  const Tensor out = at::empty({kCount}, at::kFloat), small = at::empty({100}, at::kFloat);
  rig.comm->all_reduce(whole(out), readable(values), ReduceOp::Sum, rig.stream).wait_host();
  Tensor want = at::arange(kCount, at::kFloat).mul(0.37F).sin();
  for (int r = 1; r < rig.size(); ++r) want.add_(at::arange(kCount, at::kFloat).mul(0.37F).add(r * 1.1F).sin());
  EXPECT_TRUE(at::equal(out, want)) << "the sum must be in rank order";
  rig.comm->all_reduce(whole(small), {values.data_ptr(), 100, at::kFloat}, ReduceOp::Sum, rig.stream).wait_host();
  EXPECT_TRUE(at::equal(small, want.narrow(0, 0, 100)));
}

}  // namespace

std::vector<ConformanceCheck> conformance_checks() {
  return {{"AllGatherThenEveryPartIsThere", all_gather},
          {"AllGatherInPlaceThenEveryPartIsThere", all_gather_in_place},
          {"ReduceScatterThenOwnSliceIsReduced", reduce_scatter},
          {"ReduceScatterInPlaceThenOwnSliceIsReduced", reduce_scatter_in_place},
          {"AllReduceThenEveryElementIsReduced", all_reduce},
          {"BroadcastThenRootsDataIsThere", broadcast},
          {"AllToAllThenPartsAreSwapped", all_to_all},
          {"QueuedBackToBackThenIssueOrderHolds", queued_back_to_back},
          {"GroupThenOneTicketStandsForAll", groups},
          {"GroupLeftByExceptionThenClosed", group_left_by_exception},
          {"TwoCommunicatorsThenBothMakeProgress", two_communicators},
          {"SubgroupsThenOnlyMembersTakePart", subgroups},
          {"NameUsedAgainThenNewCommunicator", name_used_again},
          {"BarrierThenNobodyLeavesEarly", barrier_waits},
          {"AllocatedBuffersThenOperationsInThem", allocated},
          {"AllocatedSizesDifferThenEveryRankIsTold", allocated_differently},
          {"WrongArgumentsThenUsageErrorAndStillUsable", wrong_arguments},
          {"AbortThenEveryCallThrowsIt", aborted}};
}

std::vector<ConformanceCheck> cpu_conformance_checks() {
  return {{"SixteenBitSumThenAccumulatedInFp32", sixteen_bit_sums}, {"SumThenInRankOrder", fixed_order}};
}

}  // namespace fsdpp::test
