/// torch's CPU allocator and operator boundaries, handed to the training runtime. The only part of
/// the training side that is built against torch, and so thin that it hardly depends on torch's
/// version.

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include "abi/step_api.h"

namespace {

c10::Allocator* torch_allocator = nullptr;
c10::DeleterFnPtr torch_raw_deleter = nullptr;
/// Whether this process joins the pool as soon as it needs to.
std::atomic<bool> joins_later{false};

/// Smaller blocks are no reason to join: a launcher of ranks has such as well.
constexpr std::size_t worth_joining_for = 65536;
constexpr int exit_without_pool = 125;  // as `sluice run` where there can be none

/// By the first thread that comes; others do without the pool meanwhile.
void join_if_wanted() {
  if (!joins_later.load(std::memory_order_relaxed) || !joins_later.exchange(false) ||
      sluice_join_host() == SLUICE_OK) {
    return;
  }
  char const* const required = std::getenv("SLUICE_REQUIRE_POOL");
  bool const is_required = required != nullptr && std::string_view{required} == "1";
  std::fprintf(stderr, "sluice: this process %s: %s\n",
               is_required ? "cannot train without sharing, since --require-pool forbids it"
                           : "trains without sharing",
               sluice_last_error());
  if (is_required) {
    std::_Exit(exit_without_pool);
  }
}

void free_ours(void* address) {
  (void)sluice_host_free(address);
}

/// For addresses whose origin is not known: ours, or torch's own.
void free_any(void* address) {
  if (sluice_host_free(address) == 0) {
    torch_raw_deleter(address);
  }
}

class pool_allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= worth_joining_for) {
      join_if_wanted();
    }
    void* address = nullptr;
    switch (sluice_host_alloc(&address, bytes)) {
      case SLUICE_OK:
        return {address, address, free_ours, c10::Device(c10::DeviceType::CPU)};
      case SLUICE_CANCELLED:
        TORCH_CHECK(false, "sluice: ", sluice_last_error());
      case SLUICE_OUT_OF_MEMORY:
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sluice: ", sluice_last_error());
      default:
        return torch_allocator->allocate(bytes);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_any; }
  void copy_data(void* to, void const* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

std::unique_ptr<at::ObserverContext> at_backward_node(at::RecordFunction const& /*function*/) {
  join_if_wanted();  // it trains
  sluice_host_boundary();
  return nullptr;
}

/// Marks what bears a name without being an operator: autograd's evaluation of a node, a function in Python.
struct caller_mark : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> before_function(at::RecordFunction const& function) {
  if (function.operator_name().has_value()) {
    sluice_host_operator_begin();
    return nullptr;
  }
  sluice_host_caller_begin();
  return std::make_unique<caller_mark>();
}

void after_function(at::RecordFunction const& /*function*/, at::ObserverContext* mark) {
  if (mark == nullptr) {
    sluice_host_operator_end();
  } else {
    sluice_host_caller_end();
  }
}

}  // namespace

/// Puts the allocator and the boundary callback in place, once. 0 if that was done.
extern "C" SLUICE_EXPORT int sluice_torch_host_install(void) {
  if (torch_allocator != nullptr) {
    return 0;
  }
  torch_allocator = c10::GetCPUAllocator();
  torch_raw_deleter = torch_allocator->raw_deleter();
  if (torch_raw_deleter == nullptr) {
    torch_allocator = nullptr;
    return 1;  // another allocator is in place that cannot be asked whose an address is
  }
  static auto& ours = *new pool_allocator;  // torch's threads may outlive what exit() destroys
  constexpr std::uint8_t above_the_default = 200;
  c10::SetCPUAllocator(&ours, above_the_default);
  at::addGlobalCallback(
      at::RecordFunctionCallback(at_backward_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  at::addGlobalCallback(at::RecordFunctionCallback(before_function, after_function)
                            .scopes({at::RecordScope::FUNCTION}));
  return 0;
}

/// Whether this process joins the pool with its first allocation that is worth it, or when it trains first, whichever comes
/// first. Says on standard error if it cannot.
extern "C" SLUICE_EXPORT void sluice_torch_host_join_later(int wanted) {
  joins_later.store(wanted != 0);
}
