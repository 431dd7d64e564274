# fsdpp_layer(NAME SOURCES ... [LINKS ...]): one OBJECT library for a layer of docs/architecture.md; all layers are joined
# into the shipped library in src/CMakeLists.txt. LINKS names other layers or imported targets whose headers it may use.
function(fsdpp_layer name)
  cmake_parse_arguments(A "" "" "SOURCES;LINKS" ${ARGN})
  add_library(fsdpp_${name} OBJECT ${A_SOURCES})
  target_include_directories(fsdpp_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
  target_link_libraries(fsdpp_${name} PRIVATE fsdpp_text PUBLIC ${A_LINKS})
  target_compile_definitions(fsdpp_${name} PRIVATE $<$<BOOL:${FSDPP_CUDA}>:FSDPP_CUDA=1>)
  set_target_properties(fsdpp_${name} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  fsdpp_warnings(fsdpp_${name})
endfunction()
