#include "dying_process.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <csignal>
#include <stdexcept>
#include <string>

#if !defined(__x86_64__)
#error "stepping over one write is written for x86-64"
#endif

namespace sluice::memhandover::trials {
namespace {

constexpr greg_t trap_flag = 0x100;

// Of the child alone, which has one thread.
std::span<std::byte> watched;
std::uint32_t writes_left;

void allow(int protection) {
  if (::mprotect(watched.data(), watched.size(), protection) != 0) {
    ::_exit(3);
  }
}

/// A write to the memory, which can only be read: it is let through, and the processor stops
/// behind it.
void on_write(int, siginfo_t* info, void* context) {
  auto const* at = static_cast<std::byte*>(info->si_addr);
  if (at < watched.data() || at >= watched.data() + watched.size()) {
    ::_exit(2);
  }
  if (writes_left-- == 0) {
    ::kill(::getpid(), SIGKILL);
  }
  allow(PROT_READ | PROT_WRITE);
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] |= trap_flag;
}

void after_write(int, siginfo_t*, void* context) {
  allow(PROT_READ);
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] &= ~trap_flag;
}

void handle(int signal, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

bool dies_after_writes(std::span<std::byte> memory, std::uint32_t survived,
                       std::function<void()> const& what) {
  auto const child = ::fork();
  if (child < 0) {
    throw std::runtime_error{"cannot fork a process that is to die"};
  }
  if (child == 0) {
    watched = memory;
    writes_left = survived;
    handle(SIGSEGV, on_write);
    handle(SIGTRAP, after_write);
    allow(PROT_READ);
    what();
    ::_exit(0);
  }
  int status = 0;
  if (::waitpid(child, &status, 0) != child ||
      (WIFEXITED(status) ? WEXITSTATUS(status) != 0 : WTERMSIG(status) != SIGKILL)) {
    throw std::runtime_error{"a process that was to die failed, status " + std::to_string(status)};
  }
  return WIFSIGNALED(status);
}

}  // namespace sluice::memhandover::trials
