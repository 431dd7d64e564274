# cmake --install: library, public headers, programs, and the package for find_package(fsdpp).
include(CMakePackageConfigHelpers)
fsdpp_torch_version(${FSDPP_TORCH_ROOT} _fsdpp_built_with)
set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/fsdpp)

# Installed programs find the library beside them, and both find the LibTorch that they were built with. Its folders are
# given by name because INSTALL_RPATH_USE_LINK_PATH leaves out those inside the source tree, such as .torch.
set(_torch_folders ${FSDPP_TORCH_ROOT}/lib)
if(FSDPP_CUDA)
  file(GLOB _nvidia ${FSDPP_TORCH_SITE}/nvidia/nccl/lib ${FSDPP_TORCH_SITE}/nvidia/cu13/lib)
  list(APPEND _torch_folders ${_nvidia})
endif()
set(_programs fsdpp-run fsdpp-prof)
if(TARGET minillm)
  list(APPEND _programs minillm)
endif()
file(RELATIVE_PATH _bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
set_target_properties(${_programs} PROPERTIES INSTALL_RPATH "$ORIGIN/${_bin_to_lib};${_torch_folders}" INSTALL_RPATH_USE_LINK_PATH ON)
set_target_properties(fsdpp PROPERTIES INSTALL_RPATH "$ORIGIN;${_torch_folders}" INSTALL_RPATH_USE_LINK_PATH ON
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

install(TARGETS fsdpp EXPORT fsdppTargets)
install(TARGETS ${_programs})
install(DIRECTORY include/fsdpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT fsdppTargets NAMESPACE fsdpp:: DESTINATION ${_package})
configure_package_config_file(cmake/fsdppConfig.cmake.in ${PROJECT_BINARY_DIR}/fsdppConfig.cmake INSTALL_DESTINATION ${_package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdppConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdppConfig.cmake ${PROJECT_BINARY_DIR}/fsdppConfigVersion.cmake cmake/FsdppTorchTargets.cmake
        DESTINATION ${_package})
