# For programs outside of this checkout: the target sluice_torch_step, the training step for libtorch, as it has been built
# here. Set before, if the defaults are not right:
#
#   SLUICE_BUILD    folder of the build (build/release of this checkout)
#   SLUICE_PYTHON   interpreter with the torch that Sluice was built against (what scripts/setup.sh chose); not asked where
#                   find_package(Torch) has found one

get_filename_component(sluice_checkout "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)
set(SLUICE_BUILD "${sluice_checkout}/build/release" CACHE PATH "Build of Sluice")
find_library(SLUICE_TORCH_STEP sluice_torch_step HINTS "${SLUICE_BUILD}/lib" NO_DEFAULT_PATH REQUIRED)

if(TARGET torch)
  set(sluice_torch torch)
else()
  if(NOT SLUICE_PYTHON)
    file(STRINGS "${sluice_checkout}/.cache/python" SLUICE_PYTHON LIMIT_COUNT 1)
  endif()
  list(APPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")
  find_package(SluicePython REQUIRED)
  find_package(TorchLibs REQUIRED)
  set(sluice_torch TorchLibs::cpu)
endif()

add_library(sluice_torch_step STATIC IMPORTED)
set_target_properties(sluice_torch_step PROPERTIES
  IMPORTED_LOCATION "${SLUICE_TORCH_STEP}"
  INTERFACE_INCLUDE_DIRECTORIES "${sluice_checkout}/runtime/cpp"
  INTERFACE_COMPILE_FEATURES cxx_std_20
  INTERFACE_LINK_LIBRARIES "${sluice_torch};${CMAKE_DL_LIBS}")
