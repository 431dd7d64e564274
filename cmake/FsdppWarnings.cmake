# Warnings are private to fsdpp's own targets and never leak to users.
function(fsdpp_warnings target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${FSDPP_WERROR}>>:-Werror>)
endfunction()
