#include "tests/fake_driver/fake_core.hpp"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "tests/fake_driver/fake_driver.h"

#define SLUICE_FAKE_CONTROL extern "C" __attribute__((visibility("default")))

namespace sluice::fake {

struct exported_symbol {
  char const* name;
  void* address;
};

extern "C" {
extern exported_symbol const fake_symbols[];
extern std::size_t const fake_symbol_count;
[[gnu::visibility("hidden")]] CUresult fake_not_implemented(unsigned index);
}

namespace {

std::atomic<pid_t> initialised_in{0};
std::atomic<CUresult> lost{CUDA_SUCCESS};  ///< why the context can do nothing any more
std::atomic<bool> goes_down{false};
std::atomic<int> own_inside{0};  ///< calls that threads of the runtime's own are in

std::size_t index_of(char const* symbol) {
  std::size_t low = 0;
  std::size_t high = fake_symbol_count;
  while (low < high) {
    std::size_t const middle = (low + high) / 2;
    int const order = std::strcmp(fake_symbols[middle].name, symbol);
    if (order == 0) {
      return middle;
    }
    (order < 0 ? low : high) = order < 0 ? middle + 1 : middle;
  }
  return fake_symbol_count;
}

call_site* sites() {
  static call_site* const all =
      new call_site[fake_symbol_count];  // never freed: streams outlive static objects
  return all;
}

/// Calls `use(symbol, first number, second number)` for every "symbol:number[:number]" of an
/// environment variable.
template <typename Use>
void for_each_setting(char const* variable, Use use) {
  char const* value = std::getenv(variable);
  std::string text = value != nullptr ? value : "";
  while (!text.empty()) {
    std::size_t const end = text.find(';');
    std::string const one = text.substr(0, end);
    text = end == std::string::npos ? "" : text.substr(end + 1);
    long long first = 0;
    long long second = 0;
    char symbol[128] = {};
    if (std::sscanf(one.c_str(), "%127[^:]:%lld:%lld", symbol, &first, &second) < 2) {
      std::fprintf(stderr, "fake driver: %s has '%s', which is not SYMBOL:NUMBER[:NUMBER]\n",
                   variable, one.c_str());
      std::abort();
    }
    use(symbol, first, second);
  }
}

[[gnu::constructor]] void read_environment() {
  for_each_setting("FAKE_CUDA_FAIL", [](char const* symbol, long long code, long long skip) {
    fake_fail(symbol, static_cast<int>(code), static_cast<unsigned>(skip));
  });
  for_each_setting("FAKE_CUDA_DELAY", [](char const* symbol, long long ns, long long /*unused*/) {
    fake_delay(symbol, ns);
  });
}

/// Whether this is a thread of the runtime's own in somebody else's process. They are named before they call the driver, or just after they have begun.
bool is_own_thread() {
  static thread_local bool const is = [] {
    std::array<char, 16> name{};
    if (::pthread_getname_np(::pthread_self(), name.data(), name.size()) != 0) {
      return false;
    }
    std::string_view const is_named{name.data()};
    return is_named == "sluice-control" || is_named == "sluice-submit" ||
           is_named == "sluice-watch";
  }();
  return is;
}

[[noreturn]] void crash() {
  std::fputs("fake driver: a thread of the runtime's is in it while the process ends\n", stderr);
  std::_Exit(EXIT_FAILURE);
}

std::size_t number_from(char const* variable, std::size_t otherwise) {
  char const* value = std::getenv(variable);
  return value != nullptr ? std::strtoull(value, nullptr, 10) : otherwise;
}

/// As a process ends its driver goes down, in so many ms as FAKE_CUDA_GOES_DOWN_MS says, and may crash meanwhile for who is in it.
/// This one always does for the runtime's own threads, which are to leave before that; others are not looked at.
void go_down() {
  if (initialised_in.load() != ::getpid()) {
    return;
  }
  goes_down.store(true);
  std::this_thread::sleep_for(std::chrono::milliseconds{number_from("FAKE_CUDA_GOES_DOWN_MS", 0)});
  if (own_inside.load() > 0) {
    crash();
  }
}

}  // namespace

CUresult fake_not_implemented(unsigned index) {
  call_scope const scope{sites()[index]};
  return scope.result() != CUDA_SUCCESS ? scope.result() : CUDA_ERROR_NOT_SUPPORTED;
}

call_site& site_of(char const* symbol) {
  std::size_t const index = index_of(symbol);
  if (index == fake_symbol_count) {
    std::fprintf(stderr, "fake driver: there is no symbol %s\n", symbol);
    std::abort();
  }
  return sites()[index];
}

call_scope::call_scope(call_site& site, needs what) : site_{site} {
  site_.inside.fetch_add(1);
  site_.calls.fetch_add(1);
  if (is_own_thread()) {
    own_inside.fetch_add(1);
    if (goes_down.load()) {
      crash();
    }
  }
  if (std::int64_t const delay = site_.delay_ns.load(); delay > 0) {
    std::this_thread::sleep_for(std::chrono::nanoseconds{delay});
  }
  if (int const failure = injected(); failure != 0) {
    result_ = static_cast<CUresult>(failure);
  } else if (what == needs::initialised && initialised_in.load() != ::getpid()) {
    result_ =
        CUDA_ERROR_NOT_INITIALIZED;  // also in a forked child: a driver does not survive fork()
  } else if (what == needs::initialised) {
    result_ = context_state();
  }
}

call_scope::~call_scope() {
  site_.inside.fetch_sub(1);
  if (is_own_thread()) {
    own_inside.fetch_sub(1);
  }
}

/// The failure that a test wants of this call, 0 for none.
int call_scope::injected() {
  if (site_.failure.load() == 0 || site_.failures_skipped.fetch_sub(1) > 0) {
    return 0;
  }
  int const failure = site_.fails_once.load() ? site_.failure.exchange(0) : site_.failure.load();
  site_.failed.fetch_add(failure != 0 ? 1 : 0);
  return failure;
}

void lose_context(CUresult why) {
  lost.store(why);
}

CUresult context_state() {
  return lost.load();
}

void set_initialised() {
  pid_t nobody = 0;
  if (initialised_in.compare_exchange_strong(nobody, ::getpid())) {
    std::atexit(go_down);
  }
}

int device_count() {
  static int const count = static_cast<int>(number_from("FAKE_CUDA_DEVICES", 1));
  return count;
}

std::size_t device_memory_bytes() {
  static std::size_t const bytes = number_from("FAKE_CUDA_MEMORY_BYTES", std::size_t{1} << 30U);
  return bytes;
}

void* exported(char const* symbol) {
  std::size_t const index = index_of(symbol);
  return index < fake_symbol_count ? fake_symbols[index].address : nullptr;
}

}  // namespace sluice::fake

using namespace sluice::fake;

namespace {

void fail(char const* symbol, int code, unsigned skip, bool once) {
  call_site& site = site_of(symbol);
  site.failure.store(0);
  site.fails_once.store(once);
  site.failures_skipped.store(skip);
  site.failure.store(code);
}

}  // namespace

SLUICE_FAKE_CONTROL void fake_fail(char const* symbol, int code, unsigned skip) {
  fail(symbol, code, skip, false);
}
SLUICE_FAKE_CONTROL void fake_fail_once(char const* symbol, int code, unsigned skip) {
  fail(symbol, code, skip, true);
}
SLUICE_FAKE_CONTROL uint64_t fake_failures(char const* symbol) {
  return site_of(symbol).failed.load();
}
SLUICE_FAKE_CONTROL void fake_delay(char const* symbol, int64_t nanoseconds) {
  site_of(symbol).delay_ns.store(nanoseconds);
}
SLUICE_FAKE_CONTROL uint64_t fake_calls(char const* symbol) {
  return site_of(symbol).calls.load();
}
SLUICE_FAKE_CONTROL uint64_t fake_calls_inside(char const* symbol) {
  return site_of(symbol).inside.load();
}
