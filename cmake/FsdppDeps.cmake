# fmt and spdlog from the system. LibTorch's wheel carries its own fmt headers, which would shadow the system's:
# a folder with links to the system's fmt/ and spdlog/ is put first on the include path of fsdpp's own sources.
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_path(_fmt_inc fmt/core.h REQUIRED)
find_path(_spdlog_inc spdlog/spdlog.h REQUIRED)
set(FSDPP_SHADOW ${CMAKE_BINARY_DIR}/system-first)
file(MAKE_DIRECTORY ${FSDPP_SHADOW})
file(CREATE_LINK ${_fmt_inc}/fmt ${FSDPP_SHADOW}/fmt SYMBOLIC)
file(CREATE_LINK ${_spdlog_inc}/spdlog ${FSDPP_SHADOW}/spdlog SYMBOLIC)
add_library(fsdpp_text INTERFACE)
target_include_directories(fsdpp_text SYSTEM BEFORE INTERFACE ${FSDPP_SHADOW})
target_link_libraries(fsdpp_text INTERFACE $<BUILD_INTERFACE:fmt::fmt> $<BUILD_INTERFACE:spdlog::spdlog>)
