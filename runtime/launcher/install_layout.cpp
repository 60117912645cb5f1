#include "runtime/launcher/install_layout.hpp"

#include "memhandover/error.hpp"

namespace sluice::launcher {
namespace {

std::filesystem::path find_python_folder(std::filesystem::path const& prefix) {
  auto holds_package = [](std::filesystem::path const& folder) {
    std::error_code ignored;
    return std::filesystem::is_directory(folder / "sluice", ignored);
  };
  if (auto installed = prefix / "lib" / "python"; holds_package(installed)) {
    return installed;
  }
  for (auto folder = prefix; folder.has_relative_path(); folder = folder.parent_path()) {
    if (auto sources = folder / "runtime" / "python"; holds_package(sources)) {
      return sources;
    }
  }
  return {};
}

}  // namespace

install_layout layout_around(std::filesystem::path const& program) {
  auto const bin = program.parent_path();
  auto const prefix = bin.parent_path();
  auto const lib = prefix / "lib";
  return {program,
          bin / "sluice-server",
          lib / "libsluice_runtime.so",
          lib / "libsluice_gate.so",
          lib / "libsluice_nccl.so",
          find_python_folder(prefix)};
}

install_layout this_installation() {
  std::error_code failed;
  auto const program = std::filesystem::read_symlink("/proc/self/exe", failed);
  if (failed) {
    throw error{error_kind::internal, "/proc/self/exe cannot be read: " + failed.message()};
  }
  return layout_around(program);
}

}  // namespace sluice::launcher
