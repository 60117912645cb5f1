# Finds cuda.h, the header of the CUDA driver API. No toolkit is needed: the wheels that torch brings carry it.
#
# Defines the target CudaDriver::headers and CUDA_DRIVER_INCLUDE_DIR. Nothing is linked: libcuda is opened at run time.

get_filename_component(sluice_site_packages "${SLUICE_TORCH_DIR}" DIRECTORY)
file(GLOB sluice_cuda_wheels "${sluice_site_packages}/nvidia/cu*/include" "${sluice_site_packages}/nvidia/cuda_runtime/include")
find_path(CUDA_DRIVER_INCLUDE_DIR cuda.h
  HINTS ${sluice_cuda_wheels} "$ENV{CUDA_HOME}/include" /usr/local/cuda/include
        "${sluice_site_packages}/triton/backends/nvidia/include"
  NO_CACHE)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CudaDriverHeaders REQUIRED_VARS CUDA_DRIVER_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "cuda.h came neither with torch nor with a toolkit: ${SLUICE_PYTHON} -m pip install nvidia-cuda-runtime")
if(CudaDriverHeaders_FOUND AND NOT TARGET CudaDriver::headers)
  add_library(CudaDriver::headers INTERFACE IMPORTED)
  target_include_directories(CudaDriver::headers SYSTEM INTERFACE "${CUDA_DRIVER_INCLUDE_DIR}")
endif()
