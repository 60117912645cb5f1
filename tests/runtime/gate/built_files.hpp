/// Where the build put what the tests open: beside the test itself, so that a build may be moved as
/// a whole.
#pragma once

#include <filesystem>
#include <string>

namespace sluice::gate {

/// A file of the build, by its path from the build's root.
[[nodiscard]] inline std::string built(std::string const& path) {
  auto const root = std::filesystem::canonical("/proc/self/exe").parent_path().parent_path();
  return (root / path).string();
}

[[nodiscard]] inline std::string gate_path() {
  return built("lib/libsluice_gate.so");
}
[[nodiscard]] inline std::string fake_driver_path() {
  return built("lib/fake_driver/libcuda.so.1");
}
[[nodiscard]] inline std::string test_runtime_path() {
  return built("lib/libsluice_test_runtime.so");
}

}  // namespace sluice::gate
