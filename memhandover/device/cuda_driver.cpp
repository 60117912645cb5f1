#include "memhandover/device/cuda_driver.hpp"

#include <dlfcn.h>
#include <spdlog/spdlog.h>

#include <cstdlib>

#include "memhandover/base/error.hpp"

// Two steps, so that the version macros of cuda.h are expanded before the name becomes a string.
#define SLUICE_TEXT(name) #name

namespace sluice::memhandover {

std::shared_ptr<cuda_driver const> cuda_driver::load(
    std::function<void*(char const*)> const& resolve) {
  auto driver = std::make_shared<cuda_driver>();
#define SLUICE_LOAD_IF_THERE(name) \
  driver->name = reinterpret_cast<decltype(driver->name)>(resolve(SLUICE_TEXT(name)));
#define SLUICE_LOAD(name)                                                                \
  SLUICE_LOAD_IF_THERE(name)                                                             \
  if (driver->name == nullptr) {                                                         \
    throw error{error_kind::unsupported,                                                 \
                "the CUDA driver has no " SLUICE_TEXT(name) "; install a newer driver"}; \
  }
  SLUICE_CUDA_FUNCTIONS(SLUICE_LOAD)
  SLUICE_OPTIONAL_CUDA_FUNCTIONS(SLUICE_LOAD_IF_THERE)
#undef SLUICE_LOAD
#undef SLUICE_LOAD_IF_THERE
  return driver;
}

void cuda_driver::expect(driver_part part, std::string_view without) const {
  char const* missing = nullptr;
#define SLUICE_LOOK(name)                      \
  if (missing == nullptr && name == nullptr) { \
    missing = SLUICE_TEXT(name);               \
  }
  switch (part) {
    case driver_part::pinning:
      SLUICE_CUDA_FUNCTIONS_TO_PIN(SLUICE_LOOK)
      break;
    case driver_part::copying:
      SLUICE_CUDA_FUNCTIONS_TO_COPY(SLUICE_LOOK)
      SLUICE_CUDA_FUNCTIONS_TO_FOLLOW(SLUICE_LOOK)
      break;
    case driver_part::hashing:
      SLUICE_CUDA_FUNCTIONS_TO_HASH(SLUICE_LOOK)
      SLUICE_CUDA_FUNCTIONS_TO_FOLLOW(SLUICE_LOOK)
      break;
  }
#undef SLUICE_LOOK
  if (missing != nullptr) {
    throw error{error_kind::unsupported, std::string{without} + ": the driver lacks " + missing};
  }
}

CUresult cuda_driver::finish(CUstream stream) const noexcept {
  constexpr int attempts = 3;
  CUresult result = CUDA_SUCCESS;
  for (int i = 0; i < attempts; ++i) {
    result = cuStreamSynchronize(stream);
    if (result == CUDA_SUCCESS || nothing_runs_after(result)) {
      return result;
    }
  }
  spdlog::critical("nobody knows when the device ends its work; this process ends result={}",
                   static_cast<int>(result));
  std::abort();
}

bool nothing_runs_after(CUresult result) noexcept {
  switch (result) {
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_NOT_INITIALIZED:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
      return true;
    default:
      return false;
  }
}

std::shared_ptr<cuda_driver const> cuda_driver::open() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw error{error_kind::unsupported, "this machine has no CUDA driver (libcuda.so.1)"};
  }
  auto driver = load([library](char const* name) { return ::dlsym(library, name); });
  driver->check(driver->cuInit(0), "cannot start the CUDA driver");
  return driver;
}

void cuda_driver::fail(CUresult result, std::string const& doing) const {
  char const* text = nullptr;
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) {
    text = "unknown error";
  }
  auto const kind = result == CUDA_ERROR_OUT_OF_MEMORY ? error_kind::out_of_memory
                    : result == CUDA_ERROR_NO_DEVICE   ? error_kind::unsupported
                                                       : error_kind::internal;
  throw error{
      kind, doing + ": " + text + " (CUDA error " + std::to_string(static_cast<int>(result)) + ")"};
}

bool cuda_available() noexcept {
  try {
    auto const driver = cuda_driver::open();
    int count = 0;
    return driver->cuDeviceGetCount(&count) == CUDA_SUCCESS && count > 0;
  } catch (std::exception const&) {
    return false;
  }
}

}  // namespace sluice::memhandover

#undef SLUICE_TEXT
