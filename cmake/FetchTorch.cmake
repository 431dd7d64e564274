# cmake -DSITE=<folder> -DKIND=cpu|cuda -DVERSION=2.11.0 -DPYTHON=<python3> -P FetchTorch.cmake
# Brings the pinned wheels from PyPI with pip and unpacks them side by side into SITE, as a Python installation would have
# them, so that LibTorch's own RPATH finds NVIDIA's libraries. SITE appears in one step or not at all, and several configure
# runs at once download once. CPU: three wheels, 543 MB, of which only what a C++ program needs is unpacked.
# KIND=headers: of the wheel WHEEL of this VERSION what matches PATTERN instead.
cmake_minimum_required(VERSION 3.25)

set(_what "LibTorch ${VERSION} (${KIND})")
set(_pip_options)
# On x86-64 PyPI has the CUDA build alone; its libtorch_cpu.so needs CUDA's runtime and CUPTI libraries, and no more.
set(_wheels torch==${VERSION} nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85)
if(KIND STREQUAL "headers")
  set(_what "${WHEEL} ${VERSION}")
  set(_wheels ${WHEEL}==${VERSION})
  set(_pip_options --retries 1 --timeout 15 --python-version 3.12) # the headers are the same for each, and older Pythons may have no wheel
  set(_header_patterns PATTERNS "${PATTERN}" "*.dist-info/*")
elseif(KIND STREQUAL "cuda") # as torch ${VERSION} and cuda-toolkit 13.0.2 require them
  list(APPEND _wheels nvidia-nccl-cu13==2.28.9 nvidia-cudnn-cu13==9.19.0.56 nvidia-cusparselt-cu13==0.8.0 nvidia-nvshmem-cu13==3.4.5
    nvidia-cublas==13.1.0.3 nvidia-cufft==12.0.0.61 nvidia-cufile==1.15.1.6 nvidia-curand==10.4.0.35 nvidia-cusolver==12.0.4.66
    nvidia-cusparse==12.6.3.3 nvidia-nvjitlink==13.0.88 nvidia-cuda-nvrtc==13.0.88 nvidia-nvtx==13.0.85)
else()
  set(_torch_patterns PATTERNS "torch/include/*" "torch/share/cmake/*" "torch/version.py" "torch/lib/libtorch_cpu.so"
    "torch/lib/libc10.so" "torch/lib/libgomp*" "torch-*.dist-info/*")
endif()

cmake_path(GET SITE PARENT_PATH _cache)
file(MAKE_DIRECTORY ${_cache})
file(LOCK ${_cache}/lock GUARD PROCESS TIMEOUT 3600)
if(EXISTS ${SITE})
  return()
endif()

set(_python ${PYTHON})
if(NOT _python)
  message(FATAL_ERROR "${_what} can't be downloaded without Python. Try: apt-get install python3 python3-pip")
endif()
execute_process(COMMAND ${_python} -m pip --version OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE _failed)
if(_failed)
  execute_process(COMMAND ${_python} -m venv ${_cache}/pip OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE _failed)
  if(_failed)
    message(FATAL_ERROR "${_what} can't be downloaded: ${_python} has neither pip nor venv. Try: apt-get install python3-pip")
  endif()
  set(_python ${_cache}/pip/bin/python)
endif()

string(RANDOM LENGTH 8 _suffix)
set(_work ${_cache}/unpacking-${_suffix})
function(stop reason)
  file(REMOVE_RECURSE ${_work})
  message(FATAL_ERROR "${reason}")
endfunction()

message(STATUS "fsdpp: downloading ${_what} into ${_cache}; this takes a while")
execute_process(COMMAND ${_python} -m pip download --quiet --no-deps --only-binary :all: ${_pip_options} --dest ${_work}/wheels ${_wheels}
                RESULT_VARIABLE _failed ERROR_VARIABLE _error)
if(_failed)
  stop("pip could not download ${_wheels}:\n${_error}")
endif()
file(GLOB _files ${_work}/wheels/*.whl)
foreach(_file IN LISTS _files)
  set(_patterns ${_header_patterns})
  if(_file MATCHES "/torch-[^/]*$")
    set(_patterns ${_torch_patterns})
  endif()
  file(ARCHIVE_EXTRACT INPUT ${_file} DESTINATION ${_work}/site ${_patterns})
endforeach()
file(RENAME ${_work}/site ${SITE} RESULT _failed)
if(_failed)
  stop("could not move the unpacked wheels to ${SITE}: ${_failed}")
endif()
file(REMOVE_RECURSE ${_work})
