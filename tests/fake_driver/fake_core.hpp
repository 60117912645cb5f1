/// What every call of the fake driver begins with: counting, injected delays and failures, the
/// state of the process.
#pragma once

#define __CUDA_API_VERSION_INTERNAL  // NOLINT: the name is cuda.h's
#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#define SLUICE_FAKE_CALL extern "C" __attribute__((visibility("default")))

namespace sluice::fake {

/// One exported function.
struct call_site {
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> inside{0};
  std::atomic<std::int64_t> delay_ns{0};
  std::atomic<int> failure{0};
  std::atomic<bool> fails_once{false};
  std::atomic<std::uint64_t> failed{0};
  std::atomic<std::int64_t> failures_skipped{
      0};  ///< calls that still go well before `failure` applies
};

[[nodiscard]] call_site& site_of(char const* symbol);

enum class needs { nothing, initialised };

/// Lives as long as a call does. `result` is what the call has to return at once, unless it is
/// CUDA_SUCCESS.
class call_scope {
 public:
  explicit call_scope(call_site& site, needs what = needs::initialised);
  call_scope(call_scope const&) = delete;
  call_scope& operator=(call_scope const&) = delete;
  ~call_scope();
  [[nodiscard]] CUresult result() const noexcept { return result_; }

 private:
  [[nodiscard]] int injected();

  call_site& site_;
  CUresult result_ = CUDA_SUCCESS;
};

/// From now on every call of this process that needs the driver fails with `why`, as after a kernel
/// that has met an address without memory.
void lose_context(CUresult why);
/// CUDA_SUCCESS, or why the context is lost.
[[nodiscard]] CUresult context_state();

void set_initialised();
[[nodiscard]] int device_count();
[[nodiscard]] std::size_t device_memory_bytes();

/// The exported function of that name, or nullptr.
[[nodiscard]] void* exported(char const* symbol);

}  // namespace sluice::fake

/// First statement of every exported function.
#define SLUICE_FAKE_ENTER_AS(name, what)                                       \
  static ::sluice::fake::call_site& fake_site = ::sluice::fake::site_of(name); \
  ::sluice::fake::call_scope const fake_scope{fake_site, what};                \
  if (fake_scope.result() != CUDA_SUCCESS) {                                   \
    return fake_scope.result();                                                \
  }
#define SLUICE_FAKE_ENTER SLUICE_FAKE_ENTER_AS(__func__, ::sluice::fake::needs::initialised)
