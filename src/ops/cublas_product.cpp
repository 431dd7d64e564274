#include "ops/cublas_product.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>

#include <map>
#include <tuple>

#include "base/enforce.h"
#include "comm/collective_use.h"
#include "ops/cublas_lt.h"
#include "ops/cuda_operator.h"
#include "ops/matrix.h"

namespace fsdpp::ops {
namespace {

// -- operands -----------------------------------------------------------------------------------------------------

// A matrix as cuBLAS takes it: columns contiguous, `ld` elements apart, perhaps to be transposed.
struct Operand {
  const void* data = nullptr;
  int64_t rows = 0, columns = 0, ld = 0;
  bool transposed = false;
};

// The transpose of `t`, since cuBLAS computes the transposed product.
Operand operand(const at::Tensor& t) {
  if (rows_contiguous(t)) return {t.const_data_ptr(), t.size(1), t.size(0), t.stride(0), false};
  return {t.const_data_ptr(), t.size(0), t.size(1), t.stride(1), true};
}

bool takes_device(const at::Tensor& t) {
  return is_half_on_cuda(t) && at::cuda::getDeviceProperties(t.device().index())->major >= 8;
}
// The largest power of two up to cuBLAS' default of 256 that divides all.
uint32_t common_alignment(std::initializer_list<const void*> addresses) {
  uintptr_t bits = 256;
  for (const void* address : addresses) bits |= reinterpret_cast<uintptr_t>(address);
  return static_cast<uint32_t>(bits & (~bits + 1));
}

bool is_bias_of(const at::Tensor& bias, const at::Tensor& out, int64_t columns) {
  return bias.dim() == 1 && bias.size(0) == columns && is_like(bias, out) && bias.is_contiguous() && is_aligned(bias);
}
bool takes_matrix(const at::Tensor& t) {
  return t.dim() == 2 && (rows_contiguous(t) || columns_contiguous(t)) && is_aligned(t);
}

// -- plans --------------------------------------------------------------------------------------------------------

struct Plan {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a, b, out;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace = 0;
};

struct Key {
  Operand a, b;  // in cuBLAS' order
  int64_t ld = 0;
  cudaDataType in = CUDA_R_16BF, out = CUDA_R_16BF;
  bool bias = false, accumulate = false;
  bool beside_collectives = false;
  int device = 0;
  uint32_t alignment = 16;  // of all addresses, in bytes

  [[nodiscard]] auto fields() const {
    return std::make_tuple(a.rows, a.columns, a.ld, a.transposed, b.rows, b.columns, b.ld, b.transposed, ld, in, out,
                           bias, accumulate, beside_collectives, device, alignment);
  }
  bool operator<(const Key& other) const { return fields() < other.fields(); }
  [[nodiscard]] uint64_t m() const { return static_cast<uint64_t>(a.transposed ? a.columns : a.rows); }
  [[nodiscard]] uint64_t n() const { return static_cast<uint64_t>(b.transposed ? b.rows : b.columns); }
};

cudaDataType data_type(const at::Tensor& t) {
  if (t.scalar_type() == at::kFloat) return CUDA_R_32F;
  return t.scalar_type() == at::kHalf ? CUDA_R_16F : CUDA_R_16BF;
}

template <class T>
void set(cublasLtMatmulDescOpaque_t& product, cublasLtMatmulDescAttributes_t what, const T& value) {
  check_cublas(cublas_lt().set_product(&product, what, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
}

cublasLtMatrixLayoutOpaque_t layout(cudaDataType type, uint64_t rows, uint64_t columns, int64_t ld) {
  cublasLtMatrixLayoutOpaque_t result;
  check_cublas(cublas_lt().init_layout(&result, sizeof result, type, rows, columns, ld), "cublasLtMatrixLayoutInit");
  return result;
}
cublasLtMatrixLayoutOpaque_t layout(cudaDataType type, const Operand& of) {
  return layout(type, static_cast<uint64_t>(of.rows), static_cast<uint64_t>(of.columns), of.ld);
}

template <class T>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t what, const T& value) {
  check_cublas(cublas_lt().set_preference(&preference, what, &value, sizeof value), "cublasLtMatmulPreferenceSetAttribute");
}

cublasLtMatmulPreferenceOpaque_t preference_of(const Key& key, size_t workspace) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check_cublas(cublas_lt().init_preference(&preference, sizeof preference), "cublasLtMatmulPreferenceInit");
  // Partial sums of a split k are added in fp32.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  for (auto what : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    set(preference, what, key.alignment);
  return preference;
}

// The first choice of the heuristic within `workspace` bytes.
cublasStatus_t choose(Plan& plan, const Key& key, size_t workspace) {
  auto preference = preference_of(key, workspace);
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  const auto status = cublas_lt().heuristic(at::cuda::getCurrentCUDABlasLtHandle(), &plan.product, &plan.a, &plan.b, &plan.out,
                                            &plan.out, &preference, 1, &found, &count);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (count == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  plan.algorithm = found.algo, plan.workspace = found.workspaceSize;
  return status;
}

// More tiles than multiprocessors. cuBLAS then hands them out through a counter in the workspace, which a memset clears
// before each product; without a workspace, each multiprocessor has its share from the beginning. That is as fast and
// leaves the GPU idle for 2 µs less, but where kernels of collectives hold some multiprocessors all wait for their
// shares: 5 % of a step on two H200.
bool has_fixed_shares(const Key& key) {
  constexpr uint64_t kTile = 128 * 256;
  const auto* gpu = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(key.device));
  return !key.beside_collectives && key.m() * key.n() > kTile * static_cast<uint64_t>(gpu->multiProcessorCount);
}

Plan make_plan(const Key& key) {
  Plan plan;
  check_cublas(cublas_lt().init_product(&plan.product, sizeof plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
               "cublasLtMatmulDescInit");
  set(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, key.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, key.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (key.bias) set(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  plan.a = layout(key.in, key.a), plan.b = layout(key.in, key.b), plan.out = layout(key.out, key.m(), key.n(), key.ld);
  auto status = has_fixed_shares(key) ? choose(plan, key, 0) : CUBLAS_STATUS_NOT_SUPPORTED;
  if (status != CUBLAS_STATUS_SUCCESS) status = choose(plan, key, at::cuda::getCUDABlasLtWorkspaceSize());
  FSDPP_ENFORCE(status == CUBLAS_STATUS_SUCCESS, CudaError,
                "cuBLASLt has no algorithm for the product of [{}, {}] and [{}, {}] as columns: {}", key.a.rows, key.a.columns, key.b.rows,
                key.b.columns, cublas_lt().status_string(status));
  return plan;
}

// Of each thread its own. Forgotten when there are too many, as with batches of ever new sizes.
const Plan& plan_of(const Key& key) {
  constexpr size_t kMost = 1024;
  thread_local std::map<Key, Plan> plans;
  if (auto known = plans.find(key); known != plans.end()) return known->second;
  if (plans.size() >= kMost) plans.clear();
  return plans.emplace(key, make_plan(key)).first->second;
}

// -- the operator -------------------------------------------------------------------------------------------------

void launch(Plan plan, const Key& key, const at::Tensor& out, const void* bias) {
  if (bias) set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  const float one = 1, beta = key.accumulate ? 1 : 0;
  void* result = out.mutable_data_ptr();
  void* workspace = plan.workspace > 0 ? at::cuda::getCUDABlasLtWorkspace() : nullptr;
  check_cublas(cublas_lt().matmul(at::cuda::getCurrentCUDABlasLtHandle(), &plan.product, &one, key.a.data, &plan.a,
                                  key.b.data, &plan.b, &beta, result, &plan.out, result, &plan.out, &plan.algorithm,
                                  workspace, plan.workspace, c10::cuda::getCurrentCUDAStream(out.device().index())),
               "cublasLtMatmul");
}

void run_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                 bool b_transposed, bool accumulate) {
  const c10::cuda::CUDAGuard guard(out.device());
  Key key{.a = operand(b), .b = operand(a), .ld = out.stride(0), .in = data_type(a), .out = data_type(out)};
  if (b_transposed) key.a.transposed = !key.a.transposed;
  key.bias = bias.has_value(), key.accumulate = accumulate, key.device = out.device().index();
  key.beside_collectives = comm::has_collectives();
  key.alignment = common_alignment({out.const_data_ptr(), a.const_data_ptr(), b.const_data_ptr()});
  launch(plan_of(key), key, out, bias ? bias->const_data_ptr() : nullptr);
}

}  // namespace

bool cublas_takes(const CublasProduct& call) {
  const auto &out = call.out, &a = call.a, &b = call.b, &bias = call.bias;
  const bool wide = out.scalar_type() == at::kFloat && out.device() == a.device() && out.numel() > 0;
  return takes_device(a) && is_like(b, a) && a.numel() > 0 && (wide || is_like(out, a)) && takes_matrix(a) &&
         takes_matrix(b) && a.size(1) == b.size(0) && out.sizes().equals({a.size(0), b.size(1)}) && rows_contiguous(out) &&
         is_aligned(out) && (!bias.defined() || is_bias_of(bias, out, out.size(1)));
}

bool cublas_takes_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return takes_device(x) && x.dim() >= 1 && x.numel() > 0 && is_like(weight, x) && x.is_contiguous() && is_aligned(x) &&
         takes_matrix(weight) && x.size(-1) == weight.size(1) && weight.size(1) * weight.element_size() % 16 == 0 &&
         weight.size(0) * weight.element_size() % 16 == 0 &&
         (!bias.defined() || is_bias_of(bias, x, weight.size(0)));
}

void cublas_product(const CublasProduct& call) {
  const auto bias = call.bias.defined() ? std::make_optional(call.bias) : std::nullopt;
  static const auto run = register_cuda_operator<&run_product>(
      "product", "(Tensor(a!) out, Tensor a, Tensor b, Tensor? bias, bool b_transposed, bool accumulate) -> ()");
  run.call(call.out, call.a, call.b, bias, call.b_transposed, call.accumulate);
}

}  // namespace fsdpp::ops
