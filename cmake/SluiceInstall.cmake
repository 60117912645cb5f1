# What `cmake --install` and a wheel hold. Under the prefix, which for a wheel is the package's own folder in site-packages:
#
#   bin/sluice, bin/sluice-server     found beside each other
#   lib/                              what is preloaded and opened, and the step for libtorch
#   include/sluice/, lib/cmake/sluice/  for find_package(sluice)
#   lib/python/sluice/                the package, but in a wheel, which is the package
#
# Libraries are found from where the program lies, so the folder may be moved.

include(CMakePackageConfigHelpers)

set(sluice_programs sluice)
set(sluice_opened sluice_runtime sluice_gate sluice_nccl)
if(SLUICE_WITH_TORCH)
  list(APPEND sluice_programs sluice-server)
  list(APPEND sluice_opened sluice_torch_host sluice_store)
  if(TARGET sluice_torch_cuda)
    list(APPEND sluice_opened sluice_torch_cuda)
  endif()
endif()

if(SKBUILD)
  set(sluice_torch_place "$ORIGIN/../../torch/lib")  # beside the package
else()
  set(sluice_torch_place "${SLUICE_TORCH_DIR}/lib")
endif()
set_target_properties(${sluice_programs} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib;${sluice_torch_place}")
set_target_properties(${sluice_opened} PROPERTIES INSTALL_RPATH "$ORIGIN;${sluice_torch_place}")
install(TARGETS ${sluice_programs} RUNTIME DESTINATION bin)
install(TARGETS ${sluice_opened} LIBRARY DESTINATION lib)

if(SLUICE_WITH_TORCH)
  install(TARGETS sluice_torch_step ARCHIVE DESTINATION lib)
  install(DIRECTORY runtime/cpp/sluice DESTINATION include FILES_MATCHING PATTERN "*.hpp")
  write_basic_package_version_file("${CMAKE_BINARY_DIR}/sluiceConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
  install(FILES cmake/sluiceConfig.cmake cmake/FindSluicePython.cmake cmake/FindTorchLibs.cmake
                "${CMAKE_BINARY_DIR}/sluiceConfigVersion.cmake"
          DESTINATION lib/cmake/sluice)
endif()

if(SKBUILD)
  install(FILES runtime/python/sluice_programs.py DESTINATION "${SKBUILD_PLATLIB_DIR}")
else()
  install(DIRECTORY runtime/python/sluice DESTINATION lib/python FILES_MATCHING PATTERN "*.py")
endif()
