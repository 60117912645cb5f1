#include "runtime/launcher/install_layout.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>

#include "memhandover/base/environment.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::launcher {
namespace {

bool is_package(std::filesystem::path const& folder) {
  std::error_code ignored;
  return std::filesystem::exists(folder / "__init__.py", ignored);
}

std::filesystem::path find_python_folder(std::filesystem::path const& prefix) {
  auto holds_package = [](std::filesystem::path const& folder) {
    std::error_code ignored;
    return std::filesystem::is_directory(folder / "sluice", ignored);
  };
  if (is_package(prefix)) {
    return {};  // this is the package, in a folder where its interpreter finds it
  }
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

std::filesystem::path find_startup_folder(std::filesystem::path const& prefix,
                                          std::filesystem::path const& python_folder) {
  auto const package = is_package(prefix) ? prefix : python_folder / "sluice";
  return package.is_absolute() ? package / "startup" : std::filesystem::path{};
}

/// 2.9 comes before 2.11.
std::vector<std::string> versions_in(std::filesystem::path const& folder) {
  std::vector<std::string> found;
  std::error_code failed;
  for (auto const& entry : std::filesystem::directory_iterator{folder, failed}) {
    found.push_back(entry.path().filename().string());
  }
  std::ranges::sort(found, {}, [](std::string const& name) {
    return std::pair{name.size(), name};
  });
  return found;
}

std::string why_no_executor(std::vector<std::string> const& torches) {
  if (torches.empty()) {
    return "this build has no inference server; build with SLUICE_WITH_TORCH=ON";
  }
  auto const named = sluice::environment("SLUICE_TORCH");
  if (named.empty()) {
    return fmt::format(
        "there are executors for torch {}: start `sluice` of the Python environment whose torch is "
        "meant, or name one of them in SLUICE_TORCH",
        fmt::join(torches, ", "));
  }
  return fmt::format(
      "Sluice was built for torch {}, not for {}; build it for that, with that environment's "
      "`python3 -m pip install --no-build-isolation --force-reinstall --no-deps .` in its sources",
      fmt::join(torches, ", "), named);
}

}  // namespace

install_layout layout_around(std::filesystem::path const& program, std::string const& torch) {
  auto const prefix = program.parent_path().parent_path();
  auto const lib = prefix / "lib";
  auto const torches = versions_in(lib / "_torch");
  auto const python_folder = find_python_folder(prefix);
  auto const chosen = torch.empty() && torches.size() == 1 ? torches.front() : torch;
  bool const is_there = std::ranges::find(torches, chosen) != torches.end();
  return {program,
          prefix / "bin" / "sluice-server",
          torches,
          is_there ? lib / "_torch" / chosen / "sluice-executor" : std::filesystem::path{},
          lib / "libsluice_runtime.so",
          lib / "libsluice_gate.so",
          lib / "libsluice_nccl.so",
          python_folder,
          find_startup_folder(prefix, python_folder)};
}

install_layout preloadable(install_layout installed, std::filesystem::path const& runtime_dir) {
  constexpr auto* ends = ": ";
  auto const folder = installed.gate_library.parent_path().string();
  if (folder.find_first_of(ends) == std::string::npos) {
    return installed;
  }
  auto const link = runtime_dir / fmt::format("lib-{:016x}", std::hash<std::string>{}(folder));
  std::error_code failed;
  std::filesystem::create_directory_symlink(folder, link, failed);
  std::error_code unreadable;
  if (link.string().find_first_of(ends) != std::string::npos ||
      std::filesystem::read_symlink(link, unreadable) != folder) {
    throw error{error_kind::unsupported,
                fmt::format("{} cannot be preloaded, because LD_PRELOAD takes no path with a blank "
                            "or a colon, and {} cannot lead there{}{}; install Sluice elsewhere, "
                            "or choose another runtime folder (--runtime-dir)",
                            installed.gate_library.string(), link.string(), failed ? ": " : "",
                            failed ? failed.message() : "")};
  }
  installed.gate_library = link / installed.gate_library.filename();
  installed.nccl_library = link / installed.nccl_library.filename();
  return installed;
}

install_layout this_installation() {
  std::error_code failed;
  auto const program = std::filesystem::read_symlink("/proc/self/exe", failed);
  if (failed) {
    throw error{error_kind::internal, "/proc/self/exe cannot be read: " + failed.message()};
  }
  return layout_around(program, sluice::environment("SLUICE_TORCH"));
}

std::filesystem::path executor_of(install_layout const& installed) {
  if (installed.executor.empty()) {
    throw error{error_kind::unsupported, why_no_executor(installed.torches)};
  }
  return installed.executor;
}

}  // namespace sluice::launcher
