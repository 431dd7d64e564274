# Finds LibTorch and sets FSDPP_TORCH_ROOT, then makes imported targets (FsdppTorchTargets.cmake). In this order:
#   1. Torch_DIR (CMake or environment variable; also CMAKE_PREFIX_PATH) as find_package(Torch) would take it,
#   2. the torch of FSDPP_PYTHON,
#   3. the pinned wheels from PyPI, kept in FSDPP_TORCH_CACHE and shared by all build folders.
# find_package(Torch) itself is not used: with the CUDA wheel it needs the CUDA toolkit even for CPU programs.
include(FsdppTorchTargets)
set(FSDPP_TORCH_VERSION 2.11.0)
set(FSDPP_TORCH_CACHE ${PROJECT_SOURCE_DIR}/.torch CACHE PATH "Folder in which downloaded LibTorch wheels are unpacked")
option(FSDPP_FETCH_TORCH "Download LibTorch, and for CUDA the headers of cudnn-frontend and CUTLASS, when they are not found" ON)
find_program(FSDPP_PYTHON NAMES python3 python DOC "A Python that may have torch; and its pip downloads LibTorch")

string(REGEX MATCH "^[0-9]+\\.[0-9]+" _wanted ${FSDPP_TORCH_VERSION})

# Takes `root` if there is a LibTorch of the right version; otherwise says why not (silent when there is nothing).
function(fsdpp_consider root origin)
  if(FSDPP_TORCH_ROOT)
    return()
  endif()
  fsdpp_torch_version("${root}" _version)
  if(NOT _version)
    return()
  endif()
  if(NOT _version MATCHES "^${_wanted}\\.")
    if(origin STREQUAL "Torch_DIR")
      message(WARNING "fsdpp: the LibTorch given by Torch_DIR is ${_version}; fsdpp is written and tested for ${_wanted}.")
    else()
      message(STATUS "fsdpp: passing over LibTorch ${_version} in ${root} (${origin}): ${_wanted} is needed")
      return()
    endif()
  endif()
  message(STATUS "fsdpp: LibTorch ${_version} in ${root} (${origin})")
  set(FSDPP_TORCH_ROOT ${root} PARENT_SCOPE)
endfunction()

set(FSDPP_TORCH_ROOT "")
foreach(_dir IN ITEMS "${Torch_DIR}" "$ENV{Torch_DIR}")
  if(_dir)
    cmake_path(SET _root NORMALIZE "${_dir}/../../..")
    string(REGEX REPLACE "/$" "" _root "${_root}")
    fsdpp_torch_version("${_root}" _version)
    if(NOT _version)
      message(FATAL_ERROR "Torch_DIR is '${_dir}', but there is no LibTorch in ${_root}. Expected the folder of "
        "TorchConfig.cmake, <LibTorch>/share/cmake/Torch.")
    endif()
    fsdpp_consider("${_root}" Torch_DIR)
  endif()
endforeach()
string(REPLACE ":" ";" _prefixes "$ENV{CMAKE_PREFIX_PATH}")
foreach(_prefix IN LISTS CMAKE_PREFIX_PATH _prefixes)
  foreach(_root ${_prefix} ${_prefix}/torch)
    fsdpp_consider("${_root}" CMAKE_PREFIX_PATH)
  endforeach()
  cmake_path(SET _root NORMALIZE "${_prefix}/../..") # torch.utils.cmake_prefix_path is <torch>/share/cmake
  string(REGEX REPLACE "/$" "" _root "${_root}")
  fsdpp_consider("${_root}" CMAKE_PREFIX_PATH)
endforeach()
if(FSDPP_PYTHON AND NOT FSDPP_TORCH_ROOT)
  execute_process(COMMAND ${FSDPP_PYTHON} -c "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
                  OUTPUT_VARIABLE _root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _failed)
  if(NOT _failed)
    fsdpp_consider("${_root}" "${FSDPP_PYTHON}")
  endif()
endif()
if(NOT FSDPP_TORCH_ROOT AND FSDPP_FETCH_TORCH)
  set(_kind cpu)
  if(FSDPP_CUDA)
    set(_kind cuda)
  endif()
  set(_site ${FSDPP_TORCH_CACHE}/${FSDPP_TORCH_VERSION}-${_kind})
  if(NOT EXISTS ${_site}/torch)
    execute_process(COMMAND ${CMAKE_COMMAND} -DSITE=${_site} -DKIND=${_kind} -DVERSION=${FSDPP_TORCH_VERSION} -DPYTHON=${FSDPP_PYTHON}
                            -P ${CMAKE_CURRENT_LIST_DIR}/FetchTorch.cmake
                    RESULT_VARIABLE _failed)
    if(_failed)
      set(FSDPP_TORCH_ROOT "")
    endif()
  endif()
  fsdpp_consider(${_site}/torch "wheels from PyPI")
endif()
if(NOT FSDPP_TORCH_ROOT)
  message(FATAL_ERROR "LibTorch ${_wanted} was not found. Ways out:\n"
    "  -DTorch_DIR=<LibTorch>/share/cmake/Torch for one that is unpacked or installed;\n"
    "  -DFSDPP_PYTHON=<python> whose `pip install torch==${FSDPP_TORCH_VERSION}` was done;\n"
    "  a python3 with pip (apt-get install python3-pip) and a way to PyPI, for an automatic download.")
endif()

if(FSDPP_CUDA)
  fsdpp_torch_cuda_problem(${FSDPP_TORCH_ROOT} _problem)
  if(_problem)
    fsdpp_no_cuda("${_problem}")
  endif()
endif()
message(STATUS "fsdpp: CUDA back end ${FSDPP_CUDA}")
set(fsdpp_built_with_cuda ${FSDPP_CUDA} CACHE INTERNAL "What FSDPP_WITH_CUDA came to")
cmake_path(GET FSDPP_TORCH_ROOT PARENT_PATH FSDPP_TORCH_SITE) # the folder with NVIDIA's wheels beside torch
fsdpp_import_torch(${FSDPP_TORCH_ROOT} ${FSDPP_CUDA})
