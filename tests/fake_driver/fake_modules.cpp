/// Modules of the fake driver: whatever the image, it has the same few kernels.
#include <cstring>

#include "tests/fake_driver/fake_driver.h"
#include "tests/fake_driver/fake_memory.hpp"

using namespace sluice::fake;

namespace {

/// Adds one to the word at its only parameter.
void add_one(void** parameters) {
  CUdeviceptr at = 0;
  std::memcpy(&at, parameters[0], sizeof at);
  auto* const word = reinterpret_cast<std::uint32_t*>(at);
  if (is_unmapped(word, sizeof *word)) {
    lose_context(CUDA_ERROR_ILLEGAL_ADDRESS);
    return;
  }
  __atomic_fetch_add(word, 1, __ATOMIC_RELAXED);
}

}  // namespace

SLUICE_FAKE_CALL CUresult cuModuleLoadData(CUmodule* out, void const* image) {
  SLUICE_FAKE_ENTER
  static char the_module;
  if (out == nullptr || image == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *out = reinterpret_cast<CUmodule>(&the_module);
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuModuleUnload(CUmodule /*loaded*/) {
  SLUICE_FAKE_ENTER
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuModuleGetFunction(CUfunction* out, CUmodule /*loaded*/,
                                              char const* name) {
  SLUICE_FAKE_ENTER
  if (out == nullptr || name == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (std::strcmp(name, "add_one") != 0) {
    return CUDA_ERROR_NOT_FOUND;
  }
  static std::size_t const pointer_only[] = {sizeof(CUdeviceptr)};
  static void* const kernel = fake_register_kernel(add_one, pointer_only, 1, 0);
  *out = static_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
