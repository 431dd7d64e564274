#include "profiler/cupti_library.h"

#include <dlfcn.h>

namespace fsdpp::profiler {
namespace {

void* open_library(const char* name, std::string& problem) {
  if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
  const char* why = dlerror();
  problem = std::string(name) + " can't be loaded: " + (why ? why : "no reason given");
  return nullptr;
}

template <class Function>
void find(void* library, const char* name, Function& function, std::string& problem) {
  if (!problem.empty()) return;
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) problem = std::string("the library lacks ") + name;
}

std::string driver_problem(const CuptiLibrary& lib) {
  int devices = 0;
  if (const CUresult result = lib.cuInit(0); result != CUDA_SUCCESS)
    return "the CUDA driver can't start (error " + std::to_string(static_cast<int>(result)) + ")";
  if (lib.cuDeviceGetCount(&devices) != CUDA_SUCCESS || devices == 0) return "there is no GPU";
  return "";
}

CuptiLibrary load() {
  CuptiLibrary lib;
  void* driver = open_library("libcuda.so.1", lib.problem);
  if (driver == nullptr) return lib;
  void* cupti = open_library("libcupti.so.13", lib.problem);  // the one that LibTorch has loaded, if it did
  if (cupti == nullptr) return lib;
#define FSDPP_STRING(name) #name
#define FSDPP_FIND_DRIVER(name) find(driver, FSDPP_STRING(name), lib.name, lib.problem);
  FSDPP_DRIVER_CALLS(FSDPP_FIND_DRIVER)
#undef FSDPP_FIND_DRIVER
#define FSDPP_FIND_CUPTI(name) find(cupti, FSDPP_STRING(name), lib.name, lib.problem);
  FSDPP_CUPTI_CALLS(FSDPP_FIND_CUPTI)
#undef FSDPP_FIND_CUPTI
#undef FSDPP_STRING
  if (lib.problem.empty()) lib.problem = driver_problem(lib);
  return lib;
}

}  // namespace

const CuptiLibrary& CuptiLibrary::get() {
  static const CuptiLibrary library = load();
  return library;
}

std::string CuptiLibrary::text(CUptiResult result) const {
  const char* text = nullptr;
  if (cuptiGetResultString == nullptr || cuptiGetResultString(result, &text) != CUPTI_SUCCESS || text == nullptr) text = "error";
  return std::string(text) + " (" + std::to_string(static_cast<int>(result)) + ")";
}

std::string CuptiLibrary::call_name(CUpti_CallbackDomain domain, CUpti_CallbackId id) const {
  const char* name = nullptr;
  if (cuptiGetCallbackName != nullptr && cuptiGetCallbackName(domain, id, &name) == CUPTI_SUCCESS && name != nullptr) return name;
  return "call " + std::to_string(id);
}

}  // namespace fsdpp::profiler
