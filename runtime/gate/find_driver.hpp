/// Finds the real libcuda.so.1 although this library carries its name.
///
/// Looked at in this order: the file named by SLUICE_REAL_LIBCUDA (and then no other), the
/// directories of LD_LIBRARY_PATH, those of /etc/ld.so.conf and its fragments, the places where
/// drivers and container runtimes put it, and last a full path by which somebody has asked for it.
/// This library itself is told apart by device and inode. Nothing is opened and nothing is
/// remembered: a driver that is installed later is found later.
#pragma once

#include <string>
#include <vector>

namespace sluice::gate {

/// Existing files that may be the driver, best first; empty on a machine without one.
[[nodiscard]] std::vector<std::string> driver_candidates();

/// Remembers a full path by which the process asked for the driver. Only the first one counts.
void suggest_driver(char const* path);

/// The path by which this library was loaded.
[[nodiscard]] std::string own_path();

}  // namespace sluice::gate
