# find_package(sluice): the target sluice::step, the training step for libtorch. From an installation, or from a checkout that has
# been built, if sluice_DIR is its folder cmake. Set before, if the defaults are not right:
#
#   SLUICE_PYTHON   interpreter with the torch that Sluice was built against; not asked where find_package(Torch) has found one
#   SLUICE_BUILD    of a checkout: the folder of the build (build/release)

get_filename_component(sluice_above "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)
get_filename_component(sluice_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(EXISTS "${sluice_prefix}/include/sluice/step.hpp")
  set(sluice_headers "${sluice_prefix}/include")
  set(sluice_libraries "${sluice_prefix}/lib")
else()
  set(SLUICE_BUILD "${sluice_above}/build/release" CACHE PATH "Build of Sluice")
  set(sluice_headers "${sluice_above}/runtime/torch/step")
  set(sluice_libraries "${SLUICE_BUILD}/lib")
  if(NOT SLUICE_PYTHON AND EXISTS "${sluice_above}/.cache/python")
    file(STRINGS "${sluice_above}/.cache/python" SLUICE_PYTHON LIMIT_COUNT 1)
  endif()
endif()
if(TARGET torch)
  set(sluice_torch torch)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" SLUICE_TORCH_MINOR "${Torch_VERSION}")
else()
  list(APPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")
  find_package(SluicePython REQUIRED)
  find_package(TorchLibs REQUIRED)
  set(sluice_torch TorchLibs::cpu)
endif()
find_library(SLUICE_TORCH_STEP sluice_torch_step HINTS "${sluice_libraries}/_torch/${SLUICE_TORCH_MINOR}" NO_DEFAULT_PATH NO_CACHE)
if(NOT SLUICE_TORCH_STEP)
  file(GLOB sluice_torches RELATIVE "${sluice_libraries}/_torch" "${sluice_libraries}/_torch/*")
  message(FATAL_ERROR "Sluice in ${sluice_libraries} was not built for torch ${SLUICE_TORCH_MINOR}, but for ${sluice_torches}")
endif()

if(NOT TARGET sluice::step)
  add_library(sluice::step STATIC IMPORTED)
  set_target_properties(sluice::step PROPERTIES
    IMPORTED_LOCATION "${SLUICE_TORCH_STEP}"
    INTERFACE_INCLUDE_DIRECTORIES "${sluice_headers}"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_LINK_LIBRARIES "${sluice_torch};${CMAKE_DL_LIBS}")
endif()
