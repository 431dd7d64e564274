# What kernels/silu_product.h is built with: the headers of NVIDIA's CUTLASS (BSD-3-Clause), for compute capability 9.0 alone. Sets
# FSDPP_CUTLASS_INCLUDE; empty: built without, and products and activations are separate kernels. They are looked for in
#   1. FSDPP_CUTLASS_DIR,
#   2. the folder of LibTorch's Python packages or of FSDPP_PYTHON's, where pip install nvidia-cutlass puts them,
#   3. the pinned wheel from PyPI (6 MB), in FSDPP_TORCH_CACHE; not with FSDPP_FETCH_TORCH=OFF.
set(FSDPP_CUTLASS_VERSION 4.2.0.0)
set(FSDPP_CUTLASS_DIR "" CACHE STRING "Folder of cutlass/cutlass.h; empty: looked for, or downloaded; OFF: built without")
set(FSDPP_CUTLASS_INCLUDE "")
set(_in_wheel cutlass_library/source/include)

# Takes the headers in `folder` if they are of CUTLASS `wanted` and none were taken yet. They are not a stable interface.
macro(_fsdpp_consider_cutlass folder wanted)
  if(NOT FSDPP_CUTLASS_INCLUDE AND EXISTS "${folder}/cutlass/version.h")
    file(STRINGS "${folder}/cutlass/version.h" _lines REGEX "#define CUTLASS_(MAJOR|MINOR) ")
    string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" _version "${_lines}")
    if("${_version}." MATCHES "^${wanted}")
      message(STATUS "fsdpp: CUTLASS ${_version} in ${folder}")
      set(FSDPP_CUTLASS_INCLUDE "${folder}")
    else()
      message(STATUS "fsdpp: passing over CUTLASS ${_version} in ${folder}: 4.2 is needed")
    endif()
  endif()
endmacro()

if(FSDPP_CUDA AND FSDPP_CUTLASS_DIR STREQUAL "OFF")
  message(STATUS "fsdpp: built without CUTLASS: products with SiLU in them are left out")
elseif(FSDPP_CUDA AND CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)(90|native|all)")
  if(FSDPP_CUTLASS_DIR)
    _fsdpp_consider_cutlass("${FSDPP_CUTLASS_DIR}" "4[.]")
    if(NOT FSDPP_CUTLASS_INCLUDE)
      message(FATAL_ERROR "FSDPP_CUTLASS_DIR is '${FSDPP_CUTLASS_DIR}', but there is no cutlass/version.h of version 4. Ways out: leave it "
        "empty; or pip download nvidia-cutlass==${FSDPP_CUTLASS_VERSION}, and its ${_in_wheel}.")
    endif()
  endif()
  _fsdpp_consider_cutlass("${FSDPP_TORCH_SITE}/${_in_wheel}" "4[.]2[.]")
  if(FSDPP_PYTHON AND NOT FSDPP_CUTLASS_INCLUDE)
    execute_process(COMMAND ${FSDPP_PYTHON} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
                    OUTPUT_VARIABLE _site OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    _fsdpp_consider_cutlass("${_site}/${_in_wheel}" "4[.]2[.]")
  endif()
  if(NOT FSDPP_CUTLASS_INCLUDE)
    set(_site ${FSDPP_TORCH_CACHE}/cutlass-${FSDPP_CUTLASS_VERSION})
    fsdpp_fetch_headers(nvidia-cutlass ${FSDPP_CUTLASS_VERSION} "${_in_wheel}/*" ${_site})
    _fsdpp_consider_cutlass("${_site}/${_in_wheel}" "4[.]2[.]")
  endif()
  if(NOT FSDPP_CUTLASS_INCLUDE)
    message(STATUS "fsdpp: CUTLASS was not found: products with SiLU in them are left out")
  endif()
elseif(FSDPP_CUDA)
  message(STATUS "fsdpp: products with SiLU in them are left out: they are for compute capability 9.0, not ${CMAKE_CUDA_ARCHITECTURES}")
endif()
