# What fsdpp::ops::attention needs to call cuDNN: NVIDIA's header-only cudnn-frontend (MIT and Apache-2.0 licences) and the headers of
# the cuDNN that LibTorch loads. Sets FSDPP_CUDNN_INCLUDES; empty: built without. Nothing is linked. The frontend is looked for in
#   1. FSDPP_CUDNN_FRONTEND_DIR,
#   2. `include` in the folder of LibTorch's Python packages or of FSDPP_PYTHON's, where pip install nvidia-cudnn-frontend puts it,
#   3. the pinned wheel from PyPI, in FSDPP_TORCH_CACHE; not with FSDPP_FETCH_TORCH=OFF.
set(FSDPP_CUDNN_FRONTEND_VERSION 1.32.0) # downloaded; found ones may be newer, not older
set(FSDPP_CUDNN_FRONTEND_DIR "" CACHE PATH "Folder of cudnn_frontend.h; empty: looked for, or downloaded")
set(FSDPP_CUDNN_INCLUDES "")

function(_fsdpp_cudnn_frontend_version folder result)
  set(${result} "" PARENT_SCOPE)
  if(EXISTS ${folder}/cudnn_frontend_version.h)
    file(STRINGS ${folder}/cudnn_frontend_version.h _lines REGEX "#define CUDNN_FRONTEND_(MAJOR|MINOR|PATCH)_VERSION ")
    if(_lines MATCHES "MAJOR_VERSION ([0-9]+).*MINOR_VERSION ([0-9]+).*PATCH_VERSION ([0-9]+)")
      set(${result} ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3} PARENT_SCOPE)
    endif()
  endif()
endfunction()

# Takes the headers in `folder` if there are any and none were taken yet.
function(_fsdpp_consider_cudnn_frontend folder)
  _fsdpp_cudnn_frontend_version("${folder}" _version)
  if(_frontend OR NOT _version)
    return()
  endif()
  if(_version VERSION_LESS FSDPP_CUDNN_FRONTEND_VERSION)
    message(STATUS "fsdpp: passing over cudnn-frontend ${_version} in ${folder}: ${FSDPP_CUDNN_FRONTEND_VERSION} or newer is needed")
    return()
  endif()
  message(STATUS "fsdpp: cudnn-frontend ${_version} in ${folder}")
  set(_frontend ${folder} PARENT_SCOPE)
endfunction()

function(_fsdpp_find_cudnn_frontend)
  set(_frontend "")
  if(FSDPP_CUDNN_FRONTEND_DIR)
    _fsdpp_consider_cudnn_frontend("${FSDPP_CUDNN_FRONTEND_DIR}")
    if(NOT _frontend)
      message(FATAL_ERROR "FSDPP_CUDNN_FRONTEND_DIR is '${FSDPP_CUDNN_FRONTEND_DIR}', but there is no cudnn_frontend.h of "
        "${FSDPP_CUDNN_FRONTEND_VERSION} or newer. Ways out: leave it empty; or pip download nvidia-cudnn-frontend, and its include folder.")
    endif()
  endif()
  _fsdpp_consider_cudnn_frontend("${FSDPP_TORCH_SITE}/include")
  if(FSDPP_PYTHON AND NOT _frontend)
    execute_process(COMMAND ${FSDPP_PYTHON} -c "import sysconfig; print(sysconfig.get_path('platlib'))"
                    OUTPUT_VARIABLE _site OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    _fsdpp_consider_cudnn_frontend("${_site}/include")
  endif()
  if(FSDPP_FETCH_TORCH AND NOT _frontend)
    set(_site ${FSDPP_TORCH_CACHE}/cudnn-frontend-${FSDPP_CUDNN_FRONTEND_VERSION})
    if(NOT EXISTS ${_site})
      execute_process(COMMAND ${CMAKE_COMMAND} -DSITE=${_site} -DKIND=headers -DWHEEL=nvidia-cudnn-frontend "-DPATTERN=include/*"
                              -DVERSION=${FSDPP_CUDNN_FRONTEND_VERSION} -DPYTHON=${FSDPP_PYTHON} -P ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/FetchTorch.cmake)
    endif()
    _fsdpp_consider_cudnn_frontend("${_site}/include")
  endif()
  set(_frontend "${_frontend}" PARENT_SCOPE)
endfunction()

if(FSDPP_CUDA)
  fsdpp_find_beside_torch(${FSDPP_TORCH_ROOT} _cudnn cudnn/include/cudnn.h include/cudnn.h)
  if(_cudnn)
    _fsdpp_find_cudnn_frontend()
  endif()
  if(_cudnn AND _frontend)
    cmake_path(GET _cudnn PARENT_PATH _cudnn)
    set(FSDPP_CUDNN_INCLUDES ${_frontend} ${_cudnn})
  else()
    message(STATUS "fsdpp: ops::attention is built without cuDNN, and runs LibTorch's operator: cudnn.h or cudnn_frontend.h was not found")
  endif()
endif()
