#pragma once
struct CUstream_st;

namespace fsdpp::cuda {
/// Queues a one-thread kernel that spins for `nanoseconds`; returns a cudaError_t as int.
int launch_spin(unsigned long long nanoseconds, CUstream_st* stream);
}  // namespace fsdpp::cuda
