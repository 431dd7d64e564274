#pragma once
#include <cublasLt.h>

/// The cuBLASLt that LibTorch has loaded: not linked, since the toolkit that builds fsdpp may bring another one.
namespace fsdpp::ops {

struct CublasLt {
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulDescInit_internal) init_product;
  decltype(&cublasLtMatmulDescSetAttribute) set_product;
  decltype(&cublasLtMatrixLayoutInit_internal) init_layout;
  decltype(&cublasLtMatmulPreferenceInit_internal) init_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtGetStatusString) status_string;
};

/// Throws CudaError if it can't be found.
[[nodiscard]] const CublasLt& cublas_lt();
/// Throws CudaError naming the call.
void check_cublas(cublasStatus_t status, const char* call);

}  // namespace fsdpp::ops
