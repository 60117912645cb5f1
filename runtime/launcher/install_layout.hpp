/// Where the parts of Sluice lie, seen from the running program. The same in a build folder and
/// when installed:
///
///   PREFIX/bin/sluice, PREFIX/bin/sluice-server
///   PREFIX/lib/libsluice_runtime.so, PREFIX/lib/libsluice_gate.so, PREFIX/lib/libsluice_nccl.so
///   PREFIX/lib/python/sluice/     or, in a build folder inside the sources, runtime/python/sluice/
///   of a folder above; or PREFIX is the package itself, in site-packages
#pragma once

#include <filesystem>

namespace sluice::launcher {

struct install_layout {
  std::filesystem::path program;  ///< sluice itself
  std::filesystem::path server;   ///< sluice-server; may not exist in a build without libtorch
  std::filesystem::path runtime_library;  ///< may not exist in a build without libtorch
  std::filesystem::path gate_library;
  std::filesystem::path nccl_library;  ///< calls NCCL as the ranks of a job agree
  /// Goes on PYTHONPATH; empty if the package was not found, or is where its interpreter finds it.
  std::filesystem::path python_folder;
};

/// The layout around `program`, an absolute path.
[[nodiscard]] install_layout layout_around(std::filesystem::path const& program);

/// `installed`, whose preloaded libraries have paths that LD_PRELOAD takes: where they lie under one
/// with a blank or a colon, those of a link in the runtime folder, which is made. Throws
/// `unsupported` if that cannot be.
[[nodiscard]] install_layout preloadable(install_layout installed,
                                         std::filesystem::path const& runtime_dir);

/// The layout around the running program, wherever it was started from. Throws `internal` without
/// /proc.
[[nodiscard]] install_layout this_installation();

}  // namespace sluice::launcher
