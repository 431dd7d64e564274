// The one source with cudnn_frontend's headers, which take longer to compile than the rest of the layer.
#include "ops/cudnn_attention.h"

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cudnn/Handle.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/accumulate.h>
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <map>
#include <mutex>

#include "base/enforce.h"
#include "fsdpp/base/log.h"
#include "ops/cuda_operator.h"
#include "ops/matrix.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // the frontend declares it and leaves it to us: where it looks for cuDNN's functions
}

namespace fsdpp::ops {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Tensor_attributes;
using TensorPointer = std::shared_ptr<Tensor_attributes>;
using Addresses = std::unordered_map<int64_t, void*>;

enum Uid : int64_t { kQuery = 1, kKey, kValue, kOut, kStats, kScale, kGradOut, kGradQuery, kGradKey, kGradValue };

/// All that a graph depends on. The scale is not: it is given at each call.
struct Problem {
  c10::DeviceIndex device;
  c10::ScalarType dtype;
  int64_t batch, heads, seq, head_dim;
  bool causal, backward, deterministic;
  auto operator<=>(const Problem&) const = default;
};

/// A built graph, or none if cuDNN refused it. cuDNN does not promise that two threads may run one at a time.
struct Plan {
  std::mutex one_at_a_time;
  bool tried = false;
  std::shared_ptr<fe::graph::Graph> graph;
};

// Never destroyed: captured CUDA graphs launch the kernels of the plans, and cuDNN may be gone before static objects
// are.
Plan& plan_of(const Problem& problem) {
  static auto& mutex = *new std::mutex;
  static auto& plans = *new std::map<Problem, Plan>;
  const std::lock_guard lock(mutex);
  return plans[problem];
}

Problem problem_of(const at::Tensor& qkv, const AttentionOptions& options, bool backward) {
  const auto batch = c10::multiply_integers(qkv.sizes().slice(0, qkv.dim() - 2));
  const bool deterministic = backward && at::globalContext().deterministicAlgorithms();
  return {qkv.device().index(), qkv.scalar_type(), batch,
          options.heads,        qkv.size(-2),      qkv.size(-1) / 3 / options.heads,
          options.causal,       backward,          deterministic};
}

// -- graphs ---------------------------------------------------------------------------------------------------------

/// [batch, heads, seq, head_dim] in rows of `parts` such tensors beside each other.
Tensor_attributes in_rows(const Problem& p, Uid uid, const char* name, int64_t parts) {
  const int64_t row = parts * p.heads * p.head_dim;
  Tensor_attributes tensor;
  tensor.set_uid(uid)
      .set_name(name)
      .set_dim({p.batch, p.heads, p.seq, p.head_dim})
      .set_stride({p.seq * row, p.head_dim, row, 1});
  return tensor;
}
Tensor_attributes stats_of(const Problem& p) {
  Tensor_attributes tensor;
  tensor.set_uid(kStats).set_name("stats").set_data_type(fe::DataType_t::FLOAT);
  tensor.set_dim({p.batch, p.heads, p.seq, 1}).set_stride({p.heads * p.seq, p.seq, 1, 1});
  return tensor;
}
Tensor_attributes scale_by_value() {
  Tensor_attributes tensor;
  tensor.set_uid(kScale).set_name("scale").set_dim({1, 1, 1, 1}).set_stride({1, 1, 1, 1});
  tensor.set_is_pass_by_value(true).set_data_type(fe::DataType_t::FLOAT);
  return tensor;
}
void set_output(const TensorPointer& tensor, const Tensor_attributes& like) {
  tensor->set_output(true).set_uid(like.get_uid()).set_dim(like.get_dim()).set_stride(like.get_stride());
}

void add_forward(fe::graph::Graph& graph, const Problem& p) {
  auto attributes =
      fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true).set_causal_mask(p.causal);
  attributes.set_attn_scale(graph.tensor(scale_by_value()));
  const auto query = graph.tensor(in_rows(p, kQuery, "query", 3)), key = graph.tensor(in_rows(p, kKey, "key", 3));
  const auto [out, stats] = graph.sdpa(query, key, graph.tensor(in_rows(p, kValue, "value", 3)), std::move(attributes));
  set_output(out, in_rows(p, kOut, "out", 1));
  set_output(stats, stats_of(p));
  stats->set_data_type(fe::DataType_t::FLOAT);
}

void add_backward(fe::graph::Graph& graph, const Problem& p) {
  auto attributes = fe::graph::SDPA_backward_attributes().set_name("attention_backward").set_causal_mask(p.causal);
  attributes.set_attn_scale(graph.tensor(scale_by_value())).set_deterministic_algorithm(p.deterministic);
  const auto query = graph.tensor(in_rows(p, kQuery, "query", 3)), key = graph.tensor(in_rows(p, kKey, "key", 3));
  const auto value = graph.tensor(in_rows(p, kValue, "value", 3)), out = graph.tensor(in_rows(p, kOut, "out", 1));
  const auto grad_out = graph.tensor(in_rows(p, kGradOut, "grad_out", 1)), stats = graph.tensor(stats_of(p));
  const auto [grad_query, grad_key, grad_value] =
      graph.sdpa_backward(query, key, value, out, grad_out, stats, std::move(attributes));
  set_output(grad_query, in_rows(p, kGradQuery, "grad_query", 3));
  set_output(grad_key, in_rows(p, kGradKey, "grad_key", 3));
  set_output(grad_value, in_rows(p, kGradValue, "grad_value", 3));
}

fe::error_t build(fe::graph::Graph& graph, const Problem& p, const cudaDeviceProp& device, cudnnHandle_t handle) {
  graph.set_io_data_type(p.dtype == at::kHalf ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16);
  graph.set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
  graph.set_sm_version(10 * device.major + device.minor);
  graph.set_cuda_graph_retention(fe::CudaGraphRetention_t::NONE);  // plans are kept anyhow
  p.backward ? add_backward(graph, p) : add_forward(graph, p);
  return graph.build(handle, {fe::HeurMode_t::A});
}

std::shared_ptr<fe::graph::Graph> build_or_warn(const Problem& p, const cudaDeviceProp& device) {
  auto graph = std::make_shared<fe::graph::Graph>();
  auto* handle = at::native::getCudnnHandle();  // throws what is wrong with the device, which is no refusal
  std::string refusal;
  try {  // the frontend mostly returns errors, and throws some
    auto status = build(*graph, p, device, handle);
    if (status.is_good()) return graph;
    refusal = status.get_message();
  } catch (const std::exception& error) {
    refusal = error.what();
  }
  const auto how = fmt::format("{}{}{}", p.causal ? ", causal" : "", p.backward ? ", in backward" : "",
                               p.deterministic ? ", deterministic" : "");
  log::warn(fmt::format(
      "attention: cuDNN does not take [{}, {}, {}, {}] (batch, heads, seq, dim of a head) of {}{}; LibTorch's operator "
      "runs in its place: {}",
      p.batch, p.heads, p.seq, p.head_dim, c10::toString(p.dtype), how, refusal));
  return nullptr;
}

bool builds(const Problem& problem, const cudaDeviceProp& device) {
  auto& plan = plan_of(problem);
  const std::lock_guard lock(plan.one_at_a_time);
  if (!plan.tried) plan.graph = build_or_warn(problem, device), plan.tried = true;
  return plan.graph != nullptr;
}

// -- which problems -------------------------------------------------------------------------------------------------

// The one that LibTorch has loaded and uses, of a version that it takes for attention.
bool has_cudnn() {
  static const bool result = [] {
    fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
    return fe::cudnn_dlhandle != nullptr && at::detail::getCUDAHooks().versionRuntimeCuDNN() > 91500;
  }();
  return result;
}

bool is_in_range(const Problem& p) {
  constexpr int64_t kMostBlocks = 65535;  // of a launch, in batch and heads
  return p.batch >= 1 && p.batch <= kMostBlocks && p.heads <= kMostBlocks && p.seq >= 2 && p.head_dim % 8 == 0 &&
         p.head_dim <= 128;
}

// -- calls ----------------------------------------------------------------------------------------------------------

void run(const Problem& problem, const at::Tensor& on, Addresses addresses, const AttentionOptions& options) {
  auto scale = static_cast<float>(*options.scale);
  addresses.emplace(kScale, &scale);
  auto& plan = plan_of(problem);
  const std::lock_guard lock(plan.one_at_a_time);
  FSDPP_ENFORCE(plan.graph, UsageError, "attention: expected shapes that cuDNN takes, got others");
  const auto workspace = at::empty({plan.graph->get_workspace_size()}, on.options().dtype(at::kByte));
  auto status = plan.graph->execute(at::native::getCudnnHandle(), addresses, workspace.data_ptr());
  FSDPP_ENFORCE(status.is_good(), CudaError, "attention: expected cuDNN to run, got: {}", status.get_message());
}

/// Where query, key and value begin.
void add_parts(Addresses& addresses, const at::Tensor& packed, Uid query, Uid key, Uid value) {
  const auto bytes = packed.size(-1) / 3 * packed.element_size();
  auto* begin = static_cast<char*>(packed.data_ptr());
  addresses.insert({{query, begin}, {key, begin + bytes}, {value, begin + 2 * bytes}});
}

void run_attention(const at::Tensor& out, const at::Tensor& stats, const at::Tensor& qkv, int64_t heads, bool causal,
                   double scale) {
  const c10::DeviceGuard guard(qkv.device());
  const AttentionOptions options{.heads = heads, .causal = causal, .scale = scale};
  Addresses addresses{{kOut, out.data_ptr()}, {kStats, stats.data_ptr()}};
  add_parts(addresses, qkv, kQuery, kKey, kValue);
  run(problem_of(qkv, options, false), qkv, std::move(addresses), options);
}

void run_attention_gradient(const at::Tensor& grad_qkv, const at::Tensor& out, const at::Tensor& stats,
                            const at::Tensor& qkv, const at::Tensor& grad_out, int64_t heads, bool causal,
                            double scale) {
  const c10::DeviceGuard guard(qkv.device());
  const AttentionOptions options{.heads = heads, .causal = causal, .scale = scale};
  Addresses addresses{{kOut, out.data_ptr()}, {kStats, stats.data_ptr()}, {kGradOut, grad_out.data_ptr()}};
  add_parts(addresses, qkv, kQuery, kKey, kValue);
  add_parts(addresses, grad_qkv, kGradQuery, kGradKey, kGradValue);
  run(problem_of(qkv, options, true), qkv, std::move(addresses), options);
}

}  // namespace

bool cudnn_takes(const at::Tensor& qkv, const AttentionOptions& options, bool with_gradient) {
  if (!is_half_on_cuda(qkv)) return false;
  if (!at::globalContext().userEnabledCuDNNSDP() || !is_in_range(problem_of(qkv, options, false))) return false;
  const auto& device = *at::cuda::getDeviceProperties(qkv.device().index());
  if ((device.major != 9 && device.major != 10) || !has_cudnn()) return false;
  const c10::DeviceGuard guard(qkv.device());
  return builds(problem_of(qkv, options, false), device) &&
         (!with_gradient || builds(problem_of(qkv, options, true), device));
}

CudnnAttention cudnn_attention(const at::Tensor& qkv, const AttentionOptions& options) {
  static const auto run = register_cuda_operator<&run_attention>(
      "attention", "(Tensor(a!) out, Tensor(b!) stats, Tensor qkv, int heads, bool causal, float scale) -> ()");
  const auto problem = problem_of(qkv, options, false);
  auto sizes = qkv.sizes().vec();
  sizes.back() /= 3;
  CudnnAttention result{at::empty(sizes, qkv.options()),
                        at::empty({problem.batch, problem.heads, problem.seq, 1}, qkv.options().dtype(at::kFloat))};
  run.call(result.out, result.stats, qkv, options.heads, options.causal, *options.scale);
  return result;
}

at::Tensor cudnn_attention_gradient(const at::Tensor& qkv, const CudnnAttention& forward, const at::Tensor& grad_out,
                                    const AttentionOptions& options) {
  static const auto run =
      register_cuda_operator<&run_attention_gradient>("attention_gradient",
                                                      "(Tensor(a!) grad_qkv, Tensor out, Tensor stats, Tensor qkv, "
                                                      "Tensor grad_out, int heads, bool causal, float scale) -> ()");
  auto result = at::empty_like(qkv);
  run.call(result, forward.out, forward.stats, qkv, grad_out, options.heads, options.causal, *options.scale);
  return result;
}

}  // namespace fsdpp::ops
