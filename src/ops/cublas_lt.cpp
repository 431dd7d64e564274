#include "ops/cublas_lt.h"

#include <dlfcn.h>

#include <string>

#include "base/enforce.h"

namespace fsdpp::ops {
namespace {

void* library() {
  static const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
  FSDPP_ENFORCE(handle, CudaError,
                "expected LibTorch to have loaded {}, it has not. Try: the LibTorch that fsdpp was built with", name);
  return handle;
}

template <class Function>
void load(Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library(), name));
  FSDPP_ENFORCE(function, CudaError, "LibTorch's cuBLASLt has no {}. Try: the LibTorch that fsdpp was built with",
                name);
}

CublasLt load_all() {
  CublasLt lt{};
  load(lt.matmul, "cublasLtMatmul");
  load(lt.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  load(lt.init_product, "cublasLtMatmulDescInit_internal");
  load(lt.set_product, "cublasLtMatmulDescSetAttribute");
  load(lt.init_layout, "cublasLtMatrixLayoutInit_internal");
  load(lt.init_preference, "cublasLtMatmulPreferenceInit_internal");
  load(lt.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  load(lt.status_string, "cublasLtGetStatusString");
  return lt;
}

}  // namespace

const CublasLt& cublas_lt() {
  static const CublasLt lt = load_all();
  return lt;
}

void check_cublas(cublasStatus_t status, const char* call) {
  FSDPP_ENFORCE(status == CUBLAS_STATUS_SUCCESS, CudaError, "{} failed: {}", call, cublas_lt().status_string(status));
}

}  // namespace fsdpp::ops
