/// System calls that fail when a test wants it. The test program is linked so that the library's
/// calls come here first (`--wrap` in CMakeLists.txt); what shared libraries call does not.
///
///   fail_call("mmap", 3, ENOMEM);   // the third call from now on fails, once
///   // … what is tested …
///   if (!call_failed()) {
///     // … there were fewer than three …
///   }
///
/// A process started with SLUICE_TEST_FAIL_CALL=NAME:N:ERRNO:FILE begins like that, and creates FILE
/// when the call has failed; with ERRNO 0 it stops (SIGSTOP) in that call, which then goes on.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <span>
#include <string>

namespace sluice::test {

/// One system call, and with what error it fails.
struct injected_call {
  char const* name;
  int error_number;
};

/// Names a case of a walk: the call and the number of its error.
void PrintTo(injected_call const& call, std::ostream* to);

/// Every pair that a walk over all calls tries: errors that the call really has.
[[nodiscard]] std::span<injected_call const> injected_calls();

void fail_call(std::string const& name, unsigned which, int error_number);
void fail_no_call();
[[nodiscard]] bool call_failed();

/// Bytes of address space that the library has mapped and not unmapped.
[[nodiscard]] std::size_t mapped_bytes();

}  // namespace sluice::test
