#include "runtime/step/operator_watch.hpp"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <system_error>
#include <thread>

#include "memhandover/base/system_error.hpp"

namespace sluice::step {
namespace {

/// Between two looks.
constexpr std::chrono::milliseconds looks_apart{1};

}  // namespace

operator_watch::operator_watch(memhandover::work_report& report, operator_gate const& operators)
    : report_(report), operators_(operators) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
  try {
    std::thread{[this] { run(); }}.detach();
  } catch (std::system_error const& why) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw memhandover::system_error("cannot start the thread that watches an engine's operators",
                                    error_kind::unavailable, why.code().value());
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void operator_watch::something_begins() noexcept {
  std::lock_guard const lock{mutex_};
  if (works_.load() != 0) {
    return;  // another thread was first
  }
  report_.begins();
  works_.store(1);
  works_.notify_one();
}

void operator_watch::run() noexcept {
  ::pthread_setname_np(::pthread_self(), "sluice-watch");
  for (;;) {
    works_.wait(0);
    std::uint64_t seen = 0;
    do {
      seen = begun_.load();
      std::this_thread::sleep_for(looks_apart);
    } while (!rest_since(seen));
  }
}

/// Whether nothing has run since then.
bool operator_watch::rest_since(std::uint64_t seen) noexcept {
  std::lock_guard const lock{mutex_};
  // From here on whoever begins comes by, or has been counted.
  works_.store(0);
  if (operators_.any_runs() || begun_.load() != seen) {
    works_.store(1);
    return false;
  }
  report_.drained(false);
  return true;
}

}  // namespace sluice::step
