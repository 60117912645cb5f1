#include "tests/runtime/step/injected_calls.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <ostream>
#include <sstream>

#include "tests/memhandover/failing_allocations.hpp"

namespace sluice::test {
namespace {

constexpr std::array all{
    injected_call{"memfd_create", EMFILE}, injected_call{"ftruncate", ENOMEM},
    injected_call{"mmap", ENOMEM},         injected_call{"mremap", ENOMEM},
    injected_call{"fallocate", ENOMEM},    injected_call{"eventfd", EMFILE},
    injected_call{"socket", EMFILE},       injected_call{"socketpair", EMFILE},
    injected_call{"connect", EINTR},       injected_call{"connect", EAGAIN},
    injected_call{"accept4", EMFILE},      injected_call{"sendmsg", EINTR},
    injected_call{"sendmsg", ENOBUFS},     injected_call{"sendmsg", EPIPE},
    injected_call{"recvmsg", EINTR},       injected_call{"recvmsg", ENOMEM},
    injected_call{"recvmsg", ECONNRESET},  injected_call{"fcntl", EMFILE},
    injected_call{"pipe2", EMFILE},        injected_call{"syscall", EMFILE},
    injected_call{"poll", EINTR},          injected_call{"poll", ENOMEM},
    injected_call{"open", EMFILE},         injected_call{"flock", EINTR},
    injected_call{"fork", EAGAIN},         injected_call{"posix_spawnp", EAGAIN},
};

struct state {
  std::mutex mutex;  ///< guards what follows
  std::string name;
  unsigned left = 0;  ///< calls until the one that fails; 0: none does
  int error_number = 0;
  bool failed = false;
  std::string tell;  ///< the file to create when it has failed
  std::map<std::uintptr_t, std::size_t> mapped;
};

state& the_state() {
  static state& one = *new state;  // threads use it until the end
  return one;
}

/// Whether this call of `name` is to fail; errno says with what.
bool fails(char const* name) {
  auto& now = the_state();
  std::lock_guard const lock{now.mutex};
  if (now.left == 0 || now.name != name || --now.left > 0) {
    return false;
  }
  if (now.error_number == 0) {
    ::raise(SIGSTOP);
    return false;
  }
  now.failed = true;
  if (!now.tell.empty()) {
    ::close(::creat(now.tell.c_str(), 0600));
  }
  errno = now.error_number;
  return true;
}

void forget(std::uintptr_t from, std::size_t bytes) {
  none_fails_here const own;
  auto& ranges = the_state().mapped;
  auto const end = from + bytes;
  auto at = ranges.upper_bound(from);
  if (at != ranges.begin()) {
    --at;
  }
  while (at != ranges.end() && at->first < end) {
    auto const [start, size] = *at;
    if (start + size <= from) {
      ++at;
      continue;
    }
    at = ranges.erase(at);
    if (start < from) {
      ranges.emplace(start, from - start);
    }
    if (start + size > end) {
      at = ranges.emplace(end, start + size - end).first;
    }
  }
}

void remember(void* where, std::size_t bytes) {
  none_fails_here const own;
  std::lock_guard const lock{the_state().mutex};
  auto const from = reinterpret_cast<std::uintptr_t>(where);
  forget(from, bytes);
  the_state().mapped[from] = bytes;
}

[[gnu::constructor]] void read_environment() {
  char const* const wanted = std::getenv("SLUICE_TEST_FAIL_CALL");
  if (wanted == nullptr) {
    return;
  }
  std::istringstream text{wanted};
  std::string name;
  std::string which;
  std::string error_number;
  std::getline(text, name, ':');
  std::getline(text, which, ':');
  std::getline(text, error_number, ':');
  std::getline(text, the_state().tell);
  fail_call(name, static_cast<unsigned>(std::stoul(which)), std::stoi(error_number));
}

}  // namespace

void PrintTo(injected_call const& call, std::ostream* to) {
  *to << call.name << '_' << call.error_number;
}

std::span<injected_call const> injected_calls() {
  return all;
}

void fail_call(std::string const& name, unsigned which, int error_number) {
  auto& now = the_state();
  std::lock_guard const lock{now.mutex};
  now.name = name;
  now.left = which;
  now.error_number = error_number;
  now.failed = false;
}

void fail_no_call() {
  std::lock_guard const lock{the_state().mutex};
  the_state().left = 0;
}

bool call_failed() {
  std::lock_guard const lock{the_state().mutex};
  return the_state().failed;
}

std::size_t mapped_bytes() {
  std::lock_guard const lock{the_state().mutex};
  std::size_t sum = 0;
  for (auto const& [start, bytes] : the_state().mapped) {
    sum += bytes;
  }
  return sum;
}

}  // namespace sluice::test

// The linker gives these names: __wrap_X is what a call of X reaches, __real_X the C library's.
// NOLINTBEGIN(bugprone-reserved-identifier, cert-dcl37-c, readability-identifier-naming)
// NOLINTBEGIN(cert-dcl50-cpp, cppcoreguidelines-pro-type-vararg)

using sluice::test::fails;

#define SLUICE_WRAP(type, name, parameters, arguments)  \
  extern "C" type __real_##name parameters;             \
  extern "C" type __wrap_##name parameters {            \
    return fails(#name) ? -1 : __real_##name arguments; \
  }

SLUICE_WRAP(int, memfd_create, (char const* name, unsigned flags), (name, flags))
SLUICE_WRAP(int, ftruncate, (int fd, off_t bytes), (fd, bytes))
SLUICE_WRAP(int, fallocate, (int fd, int mode, off_t from, off_t bytes), (fd, mode, from, bytes))
SLUICE_WRAP(int, eventfd, (unsigned count, int flags), (count, flags))
SLUICE_WRAP(int, socket, (int domain, int type, int protocol), (domain, type, protocol))
SLUICE_WRAP(int, socketpair, (int domain, int type, int protocol, int* ends),
            (domain, type, protocol, ends))
SLUICE_WRAP(int, connect, (int fd, sockaddr const* to, socklen_t size), (fd, to, size))
SLUICE_WRAP(int, accept4, (int fd, sockaddr* from, socklen_t* size, int flags),
            (fd, from, size, flags))
SLUICE_WRAP(ssize_t, sendmsg, (int fd, msghdr const* what, int flags), (fd, what, flags))
SLUICE_WRAP(ssize_t, recvmsg, (int fd, msghdr* what, int flags), (fd, what, flags))
SLUICE_WRAP(int, pipe2, (int* ends, int flags), (ends, flags))
SLUICE_WRAP(int, poll, (pollfd * polled, nfds_t count, int timeout), (polled, count, timeout))
SLUICE_WRAP(int, flock, (int fd, int operation), (fd, operation))
SLUICE_WRAP(pid_t, fork, (), ())

extern "C" {

void* __real_mmap(void* where, std::size_t bytes, int protection, int flags, int fd, off_t offset);
void* __wrap_mmap(void* where, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (fails("mmap")) {
    return MAP_FAILED;
  }
  void* const mapped = __real_mmap(where, bytes, protection, flags, fd, offset);
  if (mapped != MAP_FAILED) {
    sluice::test::remember(mapped, bytes);
  }
  return mapped;
}

int __real_munmap(void* where, std::size_t bytes);
int __wrap_munmap(void* where, std::size_t bytes) {
  {
    // Forgotten first: afterwards another thread may be given the same addresses.
    std::lock_guard const lock{sluice::test::the_state().mutex};
    sluice::test::forget(reinterpret_cast<std::uintptr_t>(where), bytes);
  }
  return __real_munmap(where, bytes);
}

void* __real_mremap(void* from, std::size_t old_bytes, std::size_t new_bytes, int flags, ...);
void* __wrap_mremap(void* from, std::size_t old_bytes, std::size_t new_bytes, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  void* const wanted = (flags & MREMAP_FIXED) != 0 ? va_arg(rest, void*) : nullptr;
  va_end(rest);
  if (fails("mremap")) {
    return MAP_FAILED;
  }
  // Without a fixed place, or without keeping the old one, the library maps nothing here.
  return __real_mremap(from, old_bytes, new_bytes, flags, wanted);
}

int __real_fcntl(int fd, int what, ...);
int __wrap_fcntl(int fd, int what, ...) {
  va_list rest;
  va_start(rest, what);
  void* const argument = va_arg(rest, void*);
  va_end(rest);
  return fails("fcntl") ? -1 : __real_fcntl(fd, what, argument);
}

int __real_open(char const* path, int flags, ...);
int __wrap_open(char const* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  auto const mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return fails("open") ? -1 : __real_open(path, flags, mode);
}

long __real_syscall(long number, ...);
/// Takes as many arguments as there can be, like the system: the caller's stack may have none there.
[[gnu::no_sanitize_address]] long __wrap_syscall(long number, ...) {
  std::array<long, 6> arguments{};
  va_list rest;
  va_start(rest, number);
  for (auto& argument : arguments) {
    argument = va_arg(rest, long);
  }
  va_end(rest);
  return fails("syscall") ? -1
                          : __real_syscall(number, arguments[0], arguments[1], arguments[2],
                                           arguments[3], arguments[4], arguments[5]);
}

int __real_posix_spawnp(pid_t* child, char const* program,
                        posix_spawn_file_actions_t const* actions,
                        posix_spawnattr_t const* attributes, char* const argv[],
                        char* const envp[]);
int __wrap_posix_spawnp(pid_t* child, char const* program,
                        posix_spawn_file_actions_t const* actions,
                        posix_spawnattr_t const* attributes, char* const argv[],
                        char* const envp[]) {
  return fails("posix_spawnp")
             ? errno
             : __real_posix_spawnp(child, program, actions, attributes, argv, envp);
}
}

// NOLINTEND(cert-dcl50-cpp, cppcoreguidelines-pro-type-vararg)
// NOLINTEND(bugprone-reserved-identifier, cert-dcl37-c, readability-identifier-naming)
