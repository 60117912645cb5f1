#include "runtime/server/executor/end_report.hpp"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace sluice::server {
namespace {

constexpr std::array fatal_signals{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGSYS};

std::atomic<host_board*> reported_on{nullptr};

void report() noexcept {
  if (auto* const board = reported_on.load(); board != nullptr) {
    board->blame_this_thread();
  }
}

/// The action is the default one again: returning repeats what caused the signal, or raises it anew.
extern "C" void on_fatal_signal(int signal) {
  report();
  (void)::raise(signal);
}

}  // namespace

void report_end_on(std::shared_ptr<host_board> board) {
  static std::shared_ptr<host_board> kept;
  kept = std::move(board);
  reported_on = kept.get();
  for (auto const signal : fatal_signals) {
    struct sigaction action {};
    action.sa_handler = on_fatal_signal;
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_ONSTACK | SA_NODEFER);
    (void)::sigaction(signal, &action, nullptr);
  }
  (void)::on_exit(
      [](int status, void* /*nothing*/) {
        report();
        if (::gettid() != ::getpid()) {  // the other threads still use what would be destroyed
          (void)std::fflush(nullptr);
          ::_exit(status);
        }
      },
      nullptr);
}

}  // namespace sluice::server
