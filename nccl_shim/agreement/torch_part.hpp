/// Where what is built against the torch of this process lies: in a folder of its own for each minor version,
///
///   …/lib/libsluice_nccl.so
///   …/lib/_torch/2.11/libsluice_store.so
#pragma once

#include <string>

namespace sluice::nccl_shim {

/// The first two numbers of the version of a torch, such as "2.11": `folder` is the package's, or
/// that of a libtorch. Empty if it does not tell.
[[nodiscard]] std::string torch_minor_in(std::string const& folder);

/// Of the torch that this process has loaded; empty without.
[[nodiscard]] std::string loaded_torch_minor();

/// The folder below `libraries` for a minor version; without one the only that there is, or else
/// `libraries` itself.
[[nodiscard]] std::string torch_part(std::string const& libraries, std::string const& minor);

}  // namespace sluice::nccl_shim
