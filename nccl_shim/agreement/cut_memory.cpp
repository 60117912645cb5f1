#include "nccl_shim/agreement/cut_memory.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;

/// Waking a thread costs more than most waits take.
constexpr std::chrono::nanoseconds awake = 50us;
/// A lost wake-up, or a dead process's, would cost no more than this.
constexpr std::chrono::nanoseconds nap = 20ms;

/// Of a word that processes share. 32 bits of it are what the kernel compares.
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                 std::chrono::nanoseconds at_most) {
  timespec const limit{at_most / 1s, (at_most % 1s).count()};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

}  // namespace

/// A processor without `prefetchw` takes it for nothing.
[[gnu::hot, gnu::target("prfchw")]] void cut_memory::launched(unsigned rank,
                                                              std::uint64_t number) noexcept {
  ranks[rank].launched.store(number, std::memory_order_seq_cst);
  if (cut_word::unpack(word.load(std::memory_order_seq_cst)).pausing != 0) {
    notify();  // it may be this rank that pauses, and waits for that
  }
  // Others have read it. Fetched now, it is this processor's own by the next call, which would wait for that.
  constexpr int to_write = 1;
  __builtin_prefetch(&slot_of(rank, number + 1), to_write);
}

void cut_memory::notify() noexcept {
  turn.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, &turn, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

cut_words::view words_in_memory::look() noexcept {
  std::uint64_t const word = shared_.word.load(std::memory_order_seq_cst);  // before the troubles
  return {word, shared_.lost.load(std::memory_order_seq_cst),
          shared_.differ.load(std::memory_order_seq_cst)};
}

bool words_in_memory::exchange(std::uint64_t& seen, std::uint64_t made) noexcept {
  return shared_.word.compare_exchange_strong(seen, made, std::memory_order_seq_cst);
}

void words_in_memory::arrive(std::uint64_t at, numbered_call const& what) noexcept {
  shared_.arrive(rank_, at, what);
}

void words_in_memory::arrivals(std::span<std::uint64_t> of_ranks) noexcept {
  for (unsigned rank = 0; rank < of_ranks.size(); ++rank) {
    of_ranks[rank] = shared_.ranks[rank].arrived.load(std::memory_order_seq_cst);
  }
}

numbered_call words_in_memory::call_of(unsigned rank, std::uint64_t number) noexcept {
  return shared_.call_of(rank, number);
}

cut_words::glance words_in_memory::look_at_all(std::uint64_t at) noexcept {
  for (unsigned rank = 0; rank < ranks_; ++rank) {
    if (shared_.ranks[rank].arrived.load(std::memory_order_seq_cst) != at) {
      return {sight::somebody_missing, {}};
    }
  }
  std::uint64_t const number = at & number_mask;
  for (unsigned rank = 1; rank < ranks_; ++rank) {
    if (call_of(rank, number) != call_of(0, number)) {
      return {sight::differ, {0, rank}};
    }
  }
  return {sight::all_alike, {}};
}

bool words_in_memory::differs(unsigned neighbour, std::uint64_t number) noexcept {
  return shared_.differs(rank_, neighbour, number);
}

void words_in_memory::launched(std::uint64_t number) noexcept {
  shared_.launched(rank_, number);
}

std::uint64_t words_in_memory::launched() noexcept {
  return shared_.ranks[rank_].launched.load(std::memory_order_seq_cst);
}

void words_in_memory::lose(unsigned rank) noexcept {
  std::uint32_t nobody = 0;
  shared_.lost.compare_exchange_strong(nobody, rank + 1, std::memory_order_seq_cst);
}

void words_in_memory::differ(std::uint64_t differ) noexcept {
  std::uint64_t none = 0;
  shared_.differ.compare_exchange_strong(none, differ, std::memory_order_seq_cst);
}

std::uint32_t words_in_memory::turn() noexcept {
  return shared_.turn.load(std::memory_order_seq_cst);
}

void words_in_memory::notify() noexcept {
  shared_.notify();
}

void words_in_memory::wait(std::uint32_t seen, std::chrono::nanoseconds waited,
                           std::chrono::nanoseconds at_most) noexcept {
  if (waited < awake) {
    ::sched_yield();
    return;
  }
  shared_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  sleep_while(shared_.turn, seen, std::min(nap, at_most));
  shared_.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

std::chrono::nanoseconds words_in_memory::between_looks(
    std::chrono::nanoseconds /*waited*/) const noexcept {
  return {};
}

}  // namespace sluice::nccl_shim
