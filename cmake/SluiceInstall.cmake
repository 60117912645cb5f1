# What `cmake --install` and a wheel hold. Under the prefix, which for a wheel is the package's own folder in site-packages:
#
#   bin/sluice, bin/sluice-server
#   lib/                              what is preloaded and opened, without torch
#   lib/_torch/<minor version>/       what is built against that torch: sluice-executor, and libraries (runtime/torch)
#   include/sluice/, lib/cmake/sluice/  for find_package(sluice)
#   lib/python/sluice/                the package, but in a wheel, which is the package
#
# Libraries are found from where the program lies, so the folder may be moved.

include(CMakePackageConfigHelpers)

set_target_properties(sluice sluice-server PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
set_target_properties(sluice_runtime sluice_gate sluice_nccl PROPERTIES INSTALL_RPATH "$ORIGIN")
install(TARGETS sluice sluice-server RUNTIME DESTINATION bin)
install(TARGETS sluice_runtime sluice_gate sluice_nccl LIBRARY DESTINATION lib)
if(SLUICE_SELF_CONTAINED AND PROMETHEUS_CORE_SONAME)
  file(REAL_PATH "${PROMETHEUS_CORE_LIBRARY}" sluice_prometheus)
  install(PROGRAMS "${sluice_prometheus}" DESTINATION lib RENAME "${PROMETHEUS_CORE_SONAME}")
endif()

if(SLUICE_WITH_TORCH)
  install(DIRECTORY runtime/torch/step/sluice DESTINATION include FILES_MATCHING PATTERN "*.hpp")
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
