/// Where the parts of Sluice lie, seen from the running program. The same in a build folder and
/// when installed:
///
///   PREFIX/bin/sluice, PREFIX/bin/sluice-server
///   PREFIX/lib/libsluice_runtime.so, PREFIX/lib/libsluice_gate.so, PREFIX/lib/libsluice_nccl.so
///   PREFIX/lib/_torch/2.11/       sluice-executor, and libraries, for that version of torch
///   PREFIX/lib/python/sluice/     or, in a build folder inside the sources, runtime/python/sluice/
///                                 of a folder above; or PREFIX is the package itself, in
///                                 site-packages
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace sluice::launcher {

struct install_layout {
  std::filesystem::path program;     ///< sluice itself
  std::filesystem::path server;      ///< sluice-server
  std::vector<std::string> torches;  ///< minor versions that there are parts for, in order
  std::filesystem::path executor;    ///< sluice-executor for one of them; empty if there is none
  std::filesystem::path runtime_library;  ///< may not exist in a build without libtorch
  std::filesystem::path gate_library;
  std::filesystem::path nccl_library;  ///< calls NCCL as the ranks of a job agree
  /// Goes on PYTHONPATH; empty if the package was not found, or is where its interpreter finds it.
  std::filesystem::path python_folder;
  /// Has the sitecustomize.py with which programs that know nothing of Sluice share the host's memory; empty without the
  /// package.
  std::filesystem::path startup_folder;
};

/// The layout around `program`, an absolute path. The executor is that for `torch`, a minor version, or
/// if none is named the only one.
[[nodiscard]] install_layout layout_around(std::filesystem::path const& program,
                                           std::string const& torch = "");

/// `installed`, whose preloaded libraries have paths that LD_PRELOAD takes: where they lie under one
/// with a blank or a colon, those of a link in the runtime folder, which is made. Throws
/// `unsupported` if that cannot be.
[[nodiscard]] install_layout preloadable(install_layout installed,
                                         std::filesystem::path const& runtime_dir);

/// The layout around the running program, wherever it was started from, for the torch that SLUICE_TORCH
/// names. Throws `internal` without /proc.
[[nodiscard]] install_layout this_installation();

/// The program that computes for a server. Throws `unsupported`, saying what would be right, where there is none for the
/// torch that is meant.
[[nodiscard]] std::filesystem::path executor_of(install_layout const& installed);

}  // namespace sluice::launcher
