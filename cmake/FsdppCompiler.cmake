# Compiler cache, warnings and sanitizers. Nothing here reaches the users of the installed package.
if(PROJECT_IS_TOP_LEVEL)
  find_program(FSDPP_CCACHE ccache)
  mark_as_advanced(FSDPP_CCACHE)
  foreach(_language CXX CUDA)
    if(FSDPP_CCACHE AND NOT CMAKE_${_language}_COMPILER_LAUNCHER)
      set(CMAKE_${_language}_COMPILER_LAUNCHER ${FSDPP_CCACHE})
    endif()
  endforeach()
endif()

if(FSDPP_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${FSDPP_SANITIZE}> $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${FSDPP_SANITIZE})
endif()

# Warnings of one of fsdpp's own targets; errors with FSDPP_WERROR.
function(fsdpp_warnings target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict> # gcc.gnu.org/PR105651
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${FSDPP_UNITY_BUILD}>>:-Wno-subobject-linkage> # the sources look like headers then
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${FSDPP_WERROR}>>:-Werror>)
endfunction()
