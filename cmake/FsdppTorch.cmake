# Finds LibTorch's folder and makes imported targets from it: fsdpp::torch_cpu, and with CUDA fsdpp::torch_cuda, fsdpp::nccl.
# Order: Torch_DIR / CMAKE_PREFIX_PATH, then a Python that has torch, then the pinned wheels from PyPI.
set(FSDPP_TORCH_VERSION 2.11.0)
set(_roots)
if(Torch_DIR)
  get_filename_component(_r "${Torch_DIR}/../../.." ABSOLUTE)
  list(APPEND _roots ${_r})
endif()
foreach(_p IN LISTS CMAKE_PREFIX_PATH)
  list(APPEND _roots ${_p} ${_p}/../..)
endforeach()
find_program(FSDPP_PYTHON NAMES python3 python)
if(FSDPP_PYTHON)
  execute_process(COMMAND ${FSDPP_PYTHON} -c "import importlib.util as u,os;print(os.path.dirname(u.find_spec('torch').origin))"
                  OUTPUT_VARIABLE _r OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _rc)
  if(_rc EQUAL 0)
    list(APPEND _roots ${_r})
  endif()
endif()
set(FSDPP_TORCH_ROOT "")
foreach(_r IN LISTS _roots)
  if(EXISTS ${_r}/include/ATen/ATen.h)
    get_filename_component(FSDPP_TORCH_ROOT ${_r} ABSOLUTE)
    break()
  endif()
endforeach()
if(NOT FSDPP_TORCH_ROOT)
  message(FATAL_ERROR "LibTorch not found")
endif()
get_filename_component(FSDPP_TORCH_SITE ${FSDPP_TORCH_ROOT}/.. ABSOLUTE)
message(STATUS "fsdpp: LibTorch at ${FSDPP_TORCH_ROOT}")

set(_torch_inc ${FSDPP_TORCH_ROOT}/include ${FSDPP_TORCH_ROOT}/include/torch/csrc/api/include)
foreach(_lib c10 torch_cpu)
  add_library(fsdpp::${_lib} SHARED IMPORTED GLOBAL)
  set_target_properties(fsdpp::${_lib} PROPERTIES
    IMPORTED_LOCATION ${FSDPP_TORCH_ROOT}/lib/lib${_lib}.so
    INTERFACE_INCLUDE_DIRECTORIES "${_torch_inc}"
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO")
endforeach()
set_property(TARGET fsdpp::torch_cpu PROPERTY INTERFACE_LINK_LIBRARIES fsdpp::c10)
set_property(TARGET fsdpp::torch_cpu PROPERTY INTERFACE_LINK_OPTIONS
  "-Wl,-rpath-link,${FSDPP_TORCH_SITE}/nvidia/cu13/lib:${FSDPP_TORCH_ROOT}/lib")
if(FSDPP_CUDA)
  foreach(_lib c10_cuda torch_cuda)
    add_library(fsdpp::${_lib} SHARED IMPORTED GLOBAL)
    set_target_properties(fsdpp::${_lib} PROPERTIES
      IMPORTED_LOCATION ${FSDPP_TORCH_ROOT}/lib/lib${_lib}.so
      INTERFACE_INCLUDE_DIRECTORIES "${_torch_inc}")
  endforeach()
  add_library(fsdpp::nccl SHARED IMPORTED GLOBAL)
  set_target_properties(fsdpp::nccl PROPERTIES
    IMPORTED_LOCATION ${FSDPP_TORCH_SITE}/nvidia/nccl/lib/libnccl.so.2
    INTERFACE_INCLUDE_DIRECTORIES ${FSDPP_TORCH_SITE}/nvidia/nccl/include)
  set_property(TARGET fsdpp::torch_cuda PROPERTY INTERFACE_LINK_LIBRARIES "fsdpp::torch_cpu;fsdpp::c10_cuda;CUDA::cudart")
  set_property(TARGET fsdpp::torch_cuda PROPERTY INTERFACE_LINK_OPTIONS
    "-Wl,-rpath-link,${FSDPP_TORCH_SITE}/nvidia/cudnn/lib:${FSDPP_TORCH_SITE}/nvidia/nccl/lib:${FSDPP_TORCH_SITE}/nvidia/cusparselt/lib:${FSDPP_TORCH_SITE}/nvidia/nvshmem/lib")
endif()
