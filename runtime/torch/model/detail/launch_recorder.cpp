#include "runtime/torch/model/detail/launch_recorder.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::server::detail {
namespace {

using make_recorder = launch_recorder*();

/// Beside this program, of the same torch.
make_recorder* open_library() {
  auto const file =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libsluice_torch_graph.so";
  auto* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  auto* const found =
      library == nullptr ? nullptr : ::dlsym(library, "sluice_torch_launch_recorder");
  if (found == nullptr) {
    throw error{error_kind::unsupported, std::string{::dlerror()}};
  }
  return reinterpret_cast<make_recorder*>(found);
}

}  // namespace

std::unique_ptr<launch_recorder> recorder_of_this_thread() {
  static auto* const make = open_library();
  return std::unique_ptr<launch_recorder>{make()};
}

}  // namespace sluice::server::detail
