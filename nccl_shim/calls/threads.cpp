/// Threads of NCCL's own. Those that it makes inside of a call connect ranks, with copies of theirs that the
/// call waits for; others carry a collective's data on while it runs. What they put on the device belongs to
/// what has been agreed on, and must not wait for a gate that closes, or for its queue.
#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>
#include <memory>
#include <new>

#include "nccl_shim/calls/surroundings.hpp"

using namespace sluice::nccl_shim;

namespace {

struct start {
  void* (*routine)(void*);
  void* argument;
};

void* run_as_nccl(void* of) {
  std::unique_ptr<start> const first{static_cast<start*>(of)};
  start const own = *first;
  inside_nccl const here;  // so are the threads that this one makes
  if (gate() != nullptr) {
    gate()->exempt_thread(1);
  }
  return own.routine(own.argument);
}

}  // namespace

/// Of the C library, before which this library comes.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" __attribute__((visibility("default"))) int pthread_create(
    pthread_t* made, pthread_attr_t const* attributes, void* (*routine)(void*), void* argument) {
  static auto* const create =
      reinterpret_cast<decltype(&pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  if (!inside_nccl::here()) {
    return create(made, attributes, routine, argument);
  }
  std::unique_ptr<start> first{new (std::nothrow) start{routine, argument}};
  if (first == nullptr) {
    return EAGAIN;
  }
  int const failed = create(made, attributes, run_as_nccl, first.get());
  if (failed == 0) {
    static_cast<void>(first.release());  // the thread's
  }
  return failed;
}
