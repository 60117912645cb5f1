// Joins a target to libFuzzer, which brings `main`, and searches where the code is instrumented for it (preset fuzz). Without libFuzzer
// the target runs its seeds.
//
// A last argument that is no option is libFuzzer's corpus: a folder, which is given the seeds.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/runtime/server_fuzz/fuzz_target.hpp"

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments);
extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* bytes, std::size_t count);

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  std::filesystem::path const corpus{(*arguments)[*count - 1]};
  if (*count < 2 || !std::filesystem::is_directory(corpus)) return 0;
  int number = 0;
  for (auto const& seed : sluice::server::fuzzing::seeds()) {
    std::ofstream{corpus / ("seed-" + std::to_string(number++)), std::ios::binary} << seed;
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* bytes, std::size_t count) {
  sluice::server::fuzzing::run_one({reinterpret_cast<char const*>(bytes), count});
  return 0;
}

#ifndef SLUICE_WITH_LIBFUZZER
int main() {
  for (auto const& seed : sluice::server::fuzzing::seeds()) {
    sluice::server::fuzzing::run_one(seed);
  }
}
#endif
