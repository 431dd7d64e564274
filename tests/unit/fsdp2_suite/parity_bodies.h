#pragma once
/// Training-parity tests as functions of a world, so that they run on threads (training_parity_test.cpp) and, on the CPU or with
/// real NCCL, on processes (tests/dist/fsdp2_parity_test.cpp). All of them are collective.
#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {

/// Where a sleep is injected: this is what finds a missing wait between streams.
enum class Delay { None, AfterForward, BeforeGather, BeforeReduce, BeforeOptim, Everywhere };
inline constexpr Delay kSingleDelays[] = {Delay::AfterForward, Delay::BeforeGather, Delay::BeforeReduce, Delay::BeforeOptim};

/// Which units hold a weight that two modules share.
enum class Tying { InRoot, InOneUnit, InTwoUnits };
inline constexpr Tying kTyings[] = {Tying::InRoot, Tying::InOneUnit, Tying::InTwoUnits};

/// A mesh of `replicas` × the rest. Threads: a new one. Processes: one for all tests, since NCCL's communicators are dear.
std::shared_ptr<Mesh> mesh_of(const Rank& world, int replicas = 1);

/// What reshard_after_forward may be in a shard axis of `size` ranks: unset, true, false, and 2 where that divides it.
std::vector<Reshard> reshard_choices(int size);

void train_parity_single_group(const Rank& world, std::array<int64_t, 3> dims, Reshard reshard);
void train_parity_multi_group(const Rank& world, Reshard reshard, Delay delay, bool unshard_async = false);
void non_root_forward_backward(const Rank& world);
void multi_forward_module(const Rank& world, Reshard reshard);
void explicit_prefetching(const Rank& world);
void post_optim_event(const Rank& world);
void train_parity_with_shared_params(const Rank& world, Reshard reshard, Tying tying);
void train_shared_params_uneven_shard(const Rank& world, Reshard reshard);
/// `sync_at_last_only`: gradients of all but the last of three micro-batches are kept unreduced.
void train_parity_hsdp(const Rank& world, int replicas, int64_t dim, Reshard reshard, bool sync_at_last_only);

}  // namespace fsdpp::test::suite
