/// Allocations of one thread that fail when a test wants it: `operator new` throws std::bad_alloc, once. The fake
/// driver's own never fail.
///
///   fail_allocation(thread, 3);   // the third of that thread's from now on
///   // … what is tested …
///   if (!allocation_failed()) {
///     // … there were fewer than three …
///   }
#pragma once

#include <sys/types.h>

namespace sluice::test {

void fail_allocation(pid_t thread, unsigned which);
/// Whether one has; none fails from now on.
[[nodiscard]] bool allocation_failed();

/// While it lives, the calling thread's allocations count, one of which fails.
class failing_here {
 public:
  explicit failing_here(unsigned& which);
  failing_here(failing_here const&) = delete;
  failing_here& operator=(failing_here const&) = delete;
  /// `which` is 0 if it has failed, else what is left to it.
  ~failing_here();

 private:
  unsigned& which_;
};

/// While it lives, none of the calling thread's allocations fails: what a test keeps for itself.
class none_fails_here {
 public:
  none_fails_here() noexcept;
  none_fails_here(none_fails_here const&) = delete;
  none_fails_here& operator=(none_fails_here const&) = delete;
  ~none_fails_here();
};

/// The thread of this process that has that name; 0 if there is none.
[[nodiscard]] pid_t thread_named(char const* name);

}  // namespace sluice::test
