# fsdpp_fetch_headers(WHEEL VERSION PATTERN SITE): what matches PATTERN in a wheel from PyPI, unpacked into SITE. Not fatal: says so, and is not
# tried again in this build folder. Not with FSDPP_FETCH_TORCH=OFF.
function(fsdpp_fetch_headers wheel version pattern site)
  string(MAKE_C_IDENTIFIER "_fsdpp_tried_${wheel}_${version}" _tried)
  if(NOT FSDPP_FETCH_TORCH OR EXISTS ${site} OR ${_tried})
    return()
  endif()
  execute_process(COMMAND ${CMAKE_COMMAND} -DSITE=${site} -DKIND=headers -DWHEEL=${wheel} -DVERSION=${version} "-DPATTERN=${pattern}"
                          -DPYTHON=${FSDPP_PYTHON} -P ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/FetchTorch.cmake
                  RESULT_VARIABLE _failed ERROR_VARIABLE _why)
  if(_failed)
    set(${_tried} ON CACHE INTERNAL "The download failed")
    message(STATUS "fsdpp: ${wheel} ${version} could not be downloaded; to try again: a new build folder, or -U${_tried}\n${_why}")
  endif()
endfunction()
