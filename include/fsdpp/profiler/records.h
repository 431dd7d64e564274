#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "fsdpp/trace/scope.h"

/// What one rank recorded in one window: plain values, without LibTorch and CUDA, so that tables, traces and analyses can be
/// tested on traces made by hand.
///
/// All times are nanoseconds since 1970 on the host's CLOCK_REALTIME, kernels' included (CUPTI converts them). An interval
/// is [start_ns, end_ns). Times of 0 in a record of the device mean that it was not timed; Audit counts those.
/// Every `scope`, `op`, `parent` and `kernel` is an index into the trace's vector of that name, or -1.
namespace fsdpp::profiler {

/// One operator of LibTorch on a host thread, forward or backward.
struct CpuOp {
  std::string name;  ///< "aten::mm"
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t thread = 0;        ///< the system's thread id
  uint64_t id = 0;           ///< unique in the trace ("External id")
  int parent = -1;           ///< the enclosing operator of the same thread
  int scope = -1;            ///< the innermost scope around it
  std::string shapes;        ///< "[[2, 3], [3, 4], []]" of the inputs; empty unless asked for
  std::string dtypes;        ///< "['float', 'float', '']"
  int64_t bytes = 0;         ///< of memory it took from the allocator, less what it gave back, itself alone
  int64_t device_bytes = 0;  ///< the same on the GPU
  double flops = 0;          ///< by formula; 0: none known
  int64_t sequence = -1;     ///< of autograd: equal for an operator and its backward; -1: none
  int64_t forward_thread = 0;  ///< thread of the forward operator; 0 for forward operators
  enum class Category { Op, Backward, User } category = Category::Op;
};

struct Kernel {
  std::string name;  ///< demangled
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int device = 0;
  int context = 0;
  int stream = 0;
  int64_t correlation = 0;  ///< equal to that of the launch in `runtime`
  int grid[3] = {1, 1, 1};
  int block[3] = {1, 1, 1};
  int registers = 0;            ///< per thread
  int64_t shared_memory = 0;    ///< bytes per block, static and dynamic
  int64_t graph_node_id = 0;    ///< 0: launched outside a CUDA graph
  int graph_id = 0;
  int64_t queued_ns = 0;  ///< 0: unknown
  int op = -1;            ///< the operator that launched it (in a graph: at capture)
  int scope = -1;         ///< the innermost scope at launch (in a graph: at capture)
};

struct Copy {
  enum class Kind { HostToDevice, DeviceToHost, DeviceToDevice, PeerToPeer, HostToHost, Memset, Other } kind = Kind::Other;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t bytes = 0;
  int device = 0;
  int context = 0;
  int stream = 0;
  int64_t correlation = 0;
  int64_t graph_node_id = 0;
  bool pinned = true;  ///< the host side was page-locked
  int op = -1;
  int scope = -1;
};

/// One call of the CUDA runtime or driver on a host thread.
struct Runtime {
  std::string name;  ///< "cudaLaunchKernel"
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t thread = 0;
  int64_t correlation = 0;
  bool launch = false;  ///< of exactly one kernel, outside graphs
  bool driver = false;
  int op = -1;
  int scope = -1;
};

/// A trace::Scope of the engine, the optimizer, a loader or the user, on a host thread.
struct Scope {
  trace::Kind kind = trace::Kind::User;
  std::string name;  ///< unit or user name
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t thread = 0;
  int64_t bytes = 0;  ///< moved, where known
  int parent = -1;    ///< the enclosing scope of the same thread
};

struct Sync {
  enum class Kind { Event, StreamWaitEvent, Stream, Context, Other } kind = Kind::Other;
  int64_t start_ns = 0;  ///< host times; for StreamWaitEvent of the call that enqueued the wait
  int64_t end_ns = 0;
  int device = 0;
  int context = 0;
  int stream = -1;  ///< the stream that waits; -1: none or all
  int64_t event = 0;
  int64_t correlation = 0;
  int64_t event_correlation = 0;  ///< the call that recorded the awaited event; 0: unknown
  int64_t thread = 0;
};

/// A cudaEventRecord.
struct EventRecord {
  int64_t event = 0;
  int64_t correlation = 0;
  int device = 0;
  int context = 0;
  int stream = 0;
};

/// CUPTI's own time and others' that stalls the host or the device: "COMMAND_BUFFER_FULL", "LAZY_FUNCTION_LOADING", …
struct Overhead {
  std::string kind;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t thread = 0;
};

/// Memory taken from (bytes > 0) or given back to (bytes < 0) an allocator.
struct MemoryEvent {
  int64_t time_ns = 0;
  int64_t bytes = 0;
  int64_t total_bytes = 0;     ///< allocated on the device after it
  int64_t reserved_bytes = 0;  ///< held by the caching allocator after it; 0: unknown
  uint64_t address = 0;
  int device = -1;  ///< CUDA index; -1: host memory
  int64_t thread = 0;
  enum class Category { Parameters, Gradients, Gathered, Activations, Optimizer, Other } category = Category::Other;
  int op = -1;
  int scope = -1;
  bool before = false;  ///< no allocation: the program said at the window's start what this block, held since earlier, is
};

/// One collective as the communicator issued it. On the GPU its times are those of its kernel or copies (`on_device`), else
/// the host's call. Ranks agree on (comm, sequence).
struct Collective {
  std::string comm;   ///< "shard", "replicate", …
  std::string op;     ///< "all_gather"
  std::string label;  ///< unit or purpose
  int64_t sequence = 0;
  int64_t bytes = 0;  ///< of the full buffer
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t issued_ns = 0;  ///< host time of the call
  int device = -1;
  int stream = -1;
  bool on_device = false;
  int kernel = -1;
  int scope = -1;
  int64_t thread = 0;
};

struct StepMark {
  int64_t step = 0;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t thread = 0;
};

struct Device {
  int id = 0;
  std::string name;
  int64_t memory_bytes = 0;
  int major = 0;
  int minor = 0;
  int sm_count = 0;
  int warp_size = 32;
  int max_threads_per_block = 0;
  int max_threads_per_sm = 0;
  int registers_per_block = 0;
  int registers_per_sm = 0;
  int64_t shared_per_block = 0;
  int64_t shared_per_sm = 0;
};

/// What may be wrong with the records. Each count has its names or reasons in `notes`.
struct Audit {
  int64_t launches = 0;              ///< calls that launch one kernel, outside graphs
  int64_t graph_launches = 0;
  int64_t kernels = 0;               ///< kernel records, graphs' included
  int64_t graph_kernels = 0;
  int64_t launches_without_kernel = 0;
  int64_t kernels_without_launch = 0;
  int64_t dropped_records = 0;       ///< as CUPTI counts them
  int64_t unknown_records = 0;       ///< kinds that the decoder does not know
  int64_t truncated_buffers = 0;     ///< buffers that ended inside a record
  int64_t refused_buffers = 0;       ///< the memory cap was reached: records were lost
  int64_t zero_stamps = 0;           ///< device records without times
  int64_t reversed_stamps = 0;       ///< end before start
  int64_t out_of_order = 0;          ///< kernels that start before their launch
  int64_t outside_window = 0;        ///< device records outside the window, dropped
  int64_t cut_by_window = 0;         ///< operators or scopes open when the window began or ended
  int64_t api_without_op = 0;
  int64_t clock_shift_ns = 0;        ///< how far CLOCK_REALTIME moved against CLOCK_MONOTONIC in the window
  int64_t cupti_errors = 0;
  std::map<std::string, int64_t> overhead_ns;  ///< sum for each kind of Overhead
  std::vector<std::string> errors;             ///< the trace can't be trusted: say so
  std::vector<std::string> notes;              ///< one line a finding
};

using MetadataValue = std::variant<std::string, int64_t, double>;

struct Trace {
  int rank = 0;
  int world_size = 1;
  std::string host;
  int64_t process = 0;        ///< process id
  int64_t start_ns = 0;       ///< of the window
  int64_t end_ns = 0;
  int64_t clock_offset_ns = 0;  ///< to be added to every time for rank 0's clock; 0 on rank 0 and its host
  bool has_cuda = false;        ///< the device was traced
  bool record_shapes = false;
  bool profile_memory = false;
  bool with_flops = false;
  int cupti_version = 0;
  int cuda_runtime_version = 0;
  int cuda_driver_version = 0;
  std::map<std::string, MetadataValue> metadata;  ///< free, e.g. model and flags
  std::vector<Device> devices;
  std::vector<CpuOp> cpu_ops;
  std::vector<Kernel> kernels;
  std::vector<Copy> copies;
  std::vector<Runtime> runtime;
  std::vector<Scope> scopes;
  std::vector<Sync> syncs;
  std::vector<EventRecord> events;
  std::vector<Overhead> overheads;
  std::vector<MemoryEvent> memory;
  std::vector<Collective> collectives;
  std::vector<StepMark> steps;
  Audit audit;
};

}  // namespace fsdpp::profiler
