# Finds libtorch inside the Python package, without torch's own CMake package: that one asks for a CUDA toolkit and
# runs a CUDA test program, neither of which a build without a GPU has or needs.
#
# Of the torch in SLUICE_TORCH_DIR it defines the targets, with SLUICE_TORCH_TAG after TorchLibs where there is more than one:
#   TorchLibs::cpu    headers, c10 and torch_cpu. libtorch_cuda is opened at run time where it exists.
#   TorchLibs::cuda   the same with libtorch_cuda and CUDA's headers, if this torch has them

set(sluice_torch "TorchLibs${SLUICE_TORCH_TAG}")
set(sluice_torch_lib "${SLUICE_TORCH_DIR}/lib")
foreach(found IN ITEMS TORCH_C10 TORCH_CPU TORCH_INCLUDE_DIR TORCH_CUDA TORCH_C10_CUDA TORCH_CUDA_INCLUDE_DIR
              TORCH_CUDA_CRT_INCLUDE_DIR)
  unset(${found})  # of another torch
endforeach()
find_library(TORCH_C10 c10 HINTS "${sluice_torch_lib}" NO_DEFAULT_PATH NO_CACHE)
find_library(TORCH_CPU torch_cpu HINTS "${sluice_torch_lib}" NO_DEFAULT_PATH NO_CACHE)
find_library(TORCH_CUDA torch_cuda HINTS "${sluice_torch_lib}" NO_DEFAULT_PATH NO_CACHE)
find_library(TORCH_C10_CUDA c10_cuda HINTS "${sluice_torch_lib}" NO_DEFAULT_PATH NO_CACHE)
file(GLOB sluice_cuda_headers "${SLUICE_TORCH_DIR}/../nvidia/cu*/include")
find_path(TORCH_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${sluice_cuda_headers} /usr/local/cuda/include NO_DEFAULT_PATH NO_CACHE)
# What CUDA's headers include of its compiler's is not among the packages that torch needs, except inside Triton's.
find_path(TORCH_CUDA_CRT_INCLUDE_DIR crt/host_defines.h
  HINTS ${sluice_cuda_headers} "${SLUICE_TORCH_DIR}/../triton/backends/nvidia/include" /usr/local/cuda/include
  NO_DEFAULT_PATH NO_CACHE)
find_path(TORCH_INCLUDE_DIR torch/script.h HINTS "${SLUICE_TORCH_DIR}/include" NO_DEFAULT_PATH NO_CACHE)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchLibs
  REQUIRED_VARS TORCH_C10 TORCH_CPU TORCH_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "there is no torch in '${SLUICE_TORCH_DIR}': run ./scripts/setup.sh, or build with -DSLUICE_WITH_TORCH=OFF")
if(TorchLibs_FOUND AND SLUICE_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch in ${SLUICE_TORCH_DIR} is ${SLUICE_TORCH_VERSION}, but Sluice needs 2.11 or newer. Run ./scripts/setup.sh")
endif()

if(TorchLibs_FOUND AND NOT TARGET ${sluice_torch}::cpu)
  add_library(${sluice_torch}::cpu INTERFACE IMPORTED)
  target_include_directories(${sluice_torch}::cpu SYSTEM INTERFACE
    "${TORCH_INCLUDE_DIR}" "${TORCH_INCLUDE_DIR}/torch/csrc/api/include")
  target_link_libraries(${sluice_torch}::cpu INTERFACE "${TORCH_CPU}" "${TORCH_C10}")
  if(NOT SKBUILD)  # a wheel finds the torch that it is installed beside
    target_link_options(${sluice_torch}::cpu INTERFACE "-Wl,-rpath,${sluice_torch_lib}")
  endif()
  if(TORCH_CUDA AND TORCH_C10_CUDA AND TORCH_CUDA_INCLUDE_DIR AND TORCH_CUDA_CRT_INCLUDE_DIR)
    add_library(${sluice_torch}::cuda INTERFACE IMPORTED)
    target_include_directories(${sluice_torch}::cuda SYSTEM INTERFACE
      "${TORCH_CUDA_INCLUDE_DIR}" "${TORCH_CUDA_CRT_INCLUDE_DIR}")
    target_link_libraries(${sluice_torch}::cuda INTERFACE ${sluice_torch}::cpu "${TORCH_CUDA}" "${TORCH_C10_CUDA}")
  endif()
endif()
