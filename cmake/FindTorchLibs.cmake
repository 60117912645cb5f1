# Finds libtorch inside the Python package, without torch's own CMake package: that one asks for a CUDA toolkit and
# runs a CUDA test program, neither of which a build without a GPU has or needs.
#
# Defines the targets
#   TorchLibs::cpu    headers, c10 and torch_cpu: enough for the host step library
#   TorchLibs::torch  the same with libtorch: what the server links. libtorch_cuda is opened at run time where it exists.
#   TorchLibs::cuda   the same as cpu with libtorch_cuda and CUDA's headers, if this torch has them

set(sluice_torch_lib "${SLUICE_TORCH_DIR}/lib")
find_library(TORCH_C10 c10 HINTS "${sluice_torch_lib}" NO_DEFAULT_PATH)
find_library(TORCH_CPU torch_cpu HINTS "${sluice_torch_lib}" NO_DEFAULT_PATH)
find_library(TORCH_ALL torch HINTS "${sluice_torch_lib}" NO_DEFAULT_PATH)
find_library(TORCH_CUDA torch_cuda HINTS "${sluice_torch_lib}" NO_DEFAULT_PATH)
find_library(TORCH_C10_CUDA c10_cuda HINTS "${sluice_torch_lib}" NO_DEFAULT_PATH)
file(GLOB sluice_cuda_headers "${SLUICE_TORCH_DIR}/../nvidia/cu*/include")
find_path(TORCH_CUDA_INCLUDE_DIR cusolverDn.h HINTS ${sluice_cuda_headers} /usr/local/cuda/include NO_DEFAULT_PATH)
# What CUDA's headers include of its compiler's is not among the packages that torch needs, except inside Triton's.
find_path(TORCH_CUDA_CRT_INCLUDE_DIR crt/host_defines.h
  HINTS ${sluice_cuda_headers} /usr/local/cuda/include "${SLUICE_TORCH_DIR}/../triton/backends/nvidia/include"
  NO_DEFAULT_PATH)
find_path(TORCH_INCLUDE_DIR torch/script.h HINTS "${SLUICE_TORCH_DIR}/include" NO_DEFAULT_PATH)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchLibs
  REQUIRED_VARS TORCH_C10 TORCH_CPU TORCH_ALL TORCH_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "${SLUICE_PYTHON} has no torch: run ./scripts/setup.sh, or build with -DSLUICE_WITH_TORCH=OFF")
if(TorchLibs_FOUND AND NOT SLUICE_TORCH_VERSION MATCHES "^2\\.11\\.")
  message(FATAL_ERROR "torch of ${SLUICE_PYTHON} is ${SLUICE_TORCH_VERSION}, but Sluice is built against 2.11. Run ./scripts/setup.sh")
endif()

if(TorchLibs_FOUND AND NOT TARGET TorchLibs::cpu)
  add_library(TorchLibs::cpu INTERFACE IMPORTED)
  target_include_directories(TorchLibs::cpu SYSTEM INTERFACE
    "${TORCH_INCLUDE_DIR}" "${TORCH_INCLUDE_DIR}/torch/csrc/api/include")
  target_link_libraries(TorchLibs::cpu INTERFACE "${TORCH_CPU}" "${TORCH_C10}")
  if(NOT SKBUILD)  # a wheel finds the torch that it is installed beside
    target_link_options(TorchLibs::cpu INTERFACE "-Wl,-rpath,${sluice_torch_lib}")
  endif()
  add_library(TorchLibs::torch INTERFACE IMPORTED)
  target_link_libraries(TorchLibs::torch INTERFACE TorchLibs::cpu "${TORCH_ALL}")
  if(TORCH_CUDA AND TORCH_C10_CUDA AND TORCH_CUDA_INCLUDE_DIR AND TORCH_CUDA_CRT_INCLUDE_DIR)
    add_library(TorchLibs::cuda INTERFACE IMPORTED)
    target_include_directories(TorchLibs::cuda SYSTEM INTERFACE
      "${TORCH_CUDA_INCLUDE_DIR}" "${TORCH_CUDA_CRT_INCLUDE_DIR}")
    target_link_libraries(TorchLibs::cuda INTERFACE TorchLibs::cpu "${TORCH_CUDA}" "${TORCH_C10_CUDA}")
  endif()
endif()
