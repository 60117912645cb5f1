/// `dlopen` and `dlmopen` as the process sees them: a request for libcuda.so, with whatever version
/// behind it, by name or by path, gets this library; everything else goes on to the C library by a
/// tail jump, because glibc looks at the return address to find the caller's RUNPATH and namespace.
///
/// On a machine without a driver such a request fails as it would without this library.
#pragma once

namespace sluice::gate {

/// dlopen that does not stop here: for the driver itself.
[[nodiscard]] void* open_past_the_gate(char const* path, int flags);

}  // namespace sluice::gate
