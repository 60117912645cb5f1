/// Modules of the fake driver: whatever the image, it has the same few kernels.
#include <cstring>

#include "memhandover/device/content_hash.hpp"
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

/// Writes a byte at every `stride` from `base` up to `end`; the grid is taken to be large enough.
void touch(void** parameters) {
  CUdeviceptr range[3] = {};
  for (std::size_t i = 0; i < 3; ++i) {
    std::memcpy(&range[i], parameters[i], sizeof range[i]);
  }
  auto const [base, end, stride] = range;
  for (auto at = base; at < end; at += stride) {
    auto* const byte = reinterpret_cast<unsigned char*>(at);
    if (is_unmapped(byte, 1)) {
      lose_context(CUDA_ERROR_ILLEGAL_ADDRESS);
      return;
    }
    *byte = 90;
  }
}

/// The twin of the kernel that hashes chunks: writes the three words at the third parameter.
void hash(void** parameters) {
  CUdeviceptr values[3] = {};
  for (std::size_t i = 0; i < 3; ++i) {
    std::memcpy(&values[i], parameters[i], sizeof values[i]);
  }
  auto const [base, words, result] = values;
  auto* const contents = reinterpret_cast<std::byte*>(base);
  auto* const sums = reinterpret_cast<std::uint64_t*>(result);
  if (is_unmapped(contents, words * 16) || is_unmapped(sums, 3 * sizeof *sums)) {
    lose_context(CUDA_ERROR_ILLEGAL_ADDRESS);
    return;
  }
  auto const hashed = sluice::memhandover::hash_contents({contents, words * 16});
  sums[0] = hashed.first;
  sums[1] = hashed.second;
  sums[2] = hashed.bits;
}

void* kernel_named(char const* name) {
  static std::size_t const words[3] = {sizeof(CUdeviceptr), sizeof(CUdeviceptr),
                                       sizeof(CUdeviceptr)};
  static void* const one = fake_register_kernel(add_one, words, 1, 0);
  static void* const range = fake_register_kernel(touch, words, 3, 0);
  static void* const hashing = fake_register_kernel(hash, words, 3, 0);
  return std::strcmp(name, "add_one") == 0        ? one
         : std::strcmp(name, "touch") == 0        ? range
         : std::strcmp(name, "content_hash") == 0 ? hashing
                                                  : nullptr;
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
  *out = static_cast<CUfunction>(kernel_named(name));
  return *out != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
