#include "runtime/gate/thread_slot.hpp"

#include <pthread.h>

#include <memory>

#include "runtime/gate/streams.hpp"

namespace sluice::gate {

thread_local constinit thread_slot* current_slot [[gnu::tls_model("initial-exec")]] = nullptr;

namespace {

constinit std::atomic<thread_slot*> slots{nullptr};

void leave_slot(void* value) {
  auto* slot = static_cast<thread_slot*>(value);
  streams().forget_thread(slot);
  slot->exempt = false;
  slot->protect = false;
  slot->expendable = false;
  slot->commit = 0;
  slot->remembered = {};
  current_slot = nullptr;
  slot->inside.store(0, std::memory_order_release);  // a thread cancelled inside a call
  slot->taken.store(0, std::memory_order_release);
}

// A key rather than a thread_local object: its destructor runs also in threads that the driver
// makes, and a thread that launches from a later destructor simply takes a slot again.
pthread_key_t end_of_thread() {
  static pthread_key_t const key = [] {
    pthread_key_t made{};
    ::pthread_key_create(&made, &leave_slot);
    return made;
  }();
  return key;
}

thread_slot& free_or_new_slot() {
  for (thread_slot* slot = first_slot(); slot != nullptr; slot = slot->next) {
    std::uint32_t unused = 0;
    if (slot->taken.compare_exchange_strong(unused, 1, std::memory_order_acquire)) {
      return *slot;
    }
  }
  thread_slot* slot =
      std::make_unique<thread_slot>().release();  // never freed: close() may be reading it
  slot->next = slots.load(std::memory_order_relaxed);
  while (!slots.compare_exchange_weak(slot->next, slot, std::memory_order_acq_rel)) {
  }
  return *slot;
}

}  // namespace

thread_slot& take_slot() {
  thread_slot& slot = free_or_new_slot();
  current_slot = &slot;
  ::pthread_setspecific(end_of_thread(), &slot);
  return slot;
}

thread_slot* first_slot() noexcept {
  return slots.load(std::memory_order_acquire);
}

std::uint64_t all_launches() noexcept {
  std::uint64_t sum = 0;
  for (thread_slot const* slot = first_slot(); slot != nullptr; slot = slot->next) {
    sum += slot->launches.load(std::memory_order_acquire);
  }
  return sum;
}

}  // namespace sluice::gate
