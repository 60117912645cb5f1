#include "tests/memhandover/failing_allocations.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>

namespace sluice::test {
namespace {

constinit std::atomic<pid_t> failing_thread{0};
constinit std::atomic<unsigned> left{0};  // 0: has failed, or none is to fail

thread_local constinit unsigned exempt = 0;

bool is_of_driver(void const* code) noexcept {
  Dl_info where{};
  return ::dladdr(code, &where) != 0 && std::strstr(where.dli_fname, "libcuda.so") != nullptr;
}

bool fails_here(void const* caller) noexcept {
  pid_t const thread = failing_thread.load(std::memory_order_relaxed);
  if (thread == 0 || thread != ::gettid() || exempt > 0 || left.load() == 0 ||
      is_of_driver(caller)) {
    return false;
  }
  return left.fetch_sub(1) == 1;
}

}  // namespace

void fail_allocation(pid_t thread, unsigned which) {
  left.store(which);
  failing_thread.store(thread);
}

bool allocation_failed() {
  failing_thread.store(0);
  return left.exchange(0) == 0;
}

failing_here::failing_here(unsigned& which) : which_(which) {
  fail_allocation(::gettid(), which);
}

failing_here::~failing_here() {
  failing_thread.store(0);
  which_ = left.exchange(0);
}

none_fails_here::none_fails_here() noexcept {
  ++exempt;
}

none_fails_here::~none_fails_here() {
  --exempt;
}

pid_t thread_named(char const* name) {
  for (auto const& thread : std::filesystem::directory_iterator{"/proc/self/task"}) {
    std::string found;
    std::ifstream{thread.path() / "comm"} >> found;
    if (found == name) {
      return static_cast<pid_t>(std::stol(thread.path().filename().string()));
    }
  }
  return 0;
}

}  // namespace sluice::test

// Not inlined, or the compiler takes the pair for malloc and delete.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* const found =
      sluice::test::fails_here(__builtin_return_address(0)) ? nullptr : std::malloc(bytes);
  if (found == nullptr) {
    throw std::bad_alloc{};
  }
  return found;
}

// Sanitizers bring all forms of their own that are not here.
[[gnu::noinline]] void* operator new(std::size_t bytes,
                                     std::nothrow_t const& /*says_null*/) noexcept {
  return sluice::test::fails_here(__builtin_return_address(0)) ? nullptr : std::malloc(bytes);
}

[[gnu::noinline]] void operator delete(void* where) noexcept {
  std::free(where);
}

[[gnu::noinline]] void operator delete(void* where, std::size_t /*bytes*/) noexcept {
  std::free(where);
}

[[gnu::noinline]] void operator delete(void* where, std::nothrow_t const& /*says_null*/) noexcept {
  std::free(where);
}
