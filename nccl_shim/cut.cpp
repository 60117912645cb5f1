#include "nccl_shim/cut.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>
#include <utility>

#include "nccl_shim/clock.hpp"

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;

/// Waking a thread costs more than most waits take.
constexpr std::chrono::nanoseconds awake = 50us;
/// A lost wake-up, or a dead process's, would cost no more than this.
constexpr std::chrono::nanoseconds nap = 20ms;

constexpr unsigned number_bits = 48;
constexpr std::uint64_t number_mask = (std::uint64_t{1} << number_bits) - 1;

constexpr std::uint64_t arrival(std::uint16_t epoch, std::uint64_t number) {
  return std::uint64_t{epoch} << number_bits | number;
}

/// Of a word that processes share. 32 bits of it are what the kernel compares.
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                 std::chrono::nanoseconds at_most) {
  timespec const limit{at_most / 1s, (at_most % 1s).count()};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

}  // namespace

/// Changes the word as `how` does it, and returns what it has made of it.
template <typename Change>
cut_word cut::change(Change how) noexcept {
  std::uint64_t seen = shared_.word.load(std::memory_order_relaxed);
  for (;;) {
    cut_word made = cut_word::unpack(seen);
    how(made);
    if (shared_.word.compare_exchange_weak(seen, made.pack(), std::memory_order_seq_cst)) {
      return made;
    }
  }
}

void cut::arrive(numbered_call const& what) noexcept {
  auto& own = shared_.ranks[rank_];
  auto& call = own.calls[++number_ % remembered_calls];
  call[0].store(what.operation, std::memory_order_relaxed);
  call[1].store(what.type, std::memory_order_relaxed);
  call[2].store(what.count, std::memory_order_relaxed);
  call[3].store(what.root, std::memory_order_relaxed);
  // Of two that arrive at the same time one must see the other; and who needs all to be asked sees this
  // arrival, or is seen to need it.
  own.arrived.store(arrival(epoch_, number_), std::memory_order_seq_cst);
  if (cut_word::unpack(shared_.word.load(std::memory_order_seq_cst)).needed == 0) {
    // If any two ranks differ, then two neighbours do, and the later one of them sees it.
    compare_with((rank_ + 1) % ranks_);
    compare_with((rank_ + ranks_ - 1) % ranks_);
    return;
  }
  try_to_grant();
}

outcome cut::await(std::int64_t deadline_ns) noexcept {
  return wait(deadline_ns, [this]() -> std::optional<outcome> {
    auto const now = cut_word::unpack(shared_.word.load(std::memory_order_seq_cst));
    if (now.granted >= number_) {
      return outcome::granted;
    }
    if (auto const bad = trouble()) {
      return bad;
    }
    if (now.needed == 0) {
      return outcome::granted;
    }
    if (now.epoch != epoch_) {
      epoch_ = now.epoch;
      --number_;
      return outcome::dropped;
    }
    return std::nullopt;
  });
}

void cut::launched() noexcept {
  shared_.ranks[rank_].launched.store(number_, std::memory_order_seq_cst);
  if (cut_word::unpack(shared_.word.load(std::memory_order_seq_cst)).pausing != 0) {
    tell();  // it may be this rank that pauses, and waits for that
  }
}

std::uint64_t cut::pause(bool again) noexcept {
  auto const made = change([again](cut_word& word) {
    ++word.pausing;
    if (again) {
      word.next_epoch();
    }
  });
  if (again) {
    tell();
  }
  return made.granted;
}

outcome cut::await_debts(std::uint64_t up_to, std::int64_t deadline_ns) noexcept {
  return wait(deadline_ns, [this, up_to]() -> std::optional<outcome> {
    if (shared_.ranks[rank_].launched.load(std::memory_order_seq_cst) >= up_to) {
      return outcome::granted;
    }
    return trouble();
  });
}

void cut::resume() noexcept {
  shared_.word.fetch_sub(cut_word::one_pausing, std::memory_order_seq_cst);
  try_to_grant();
}

void cut::resume_without() noexcept {
  epoch_ = change([this](cut_word& word) {
             --word.pausing;
             if (word.epoch == epoch_) {
               word.next_epoch();
             }
           }).epoch;
  --number_;
  tell();
  try_to_grant();
}

void cut::begin_epoch() noexcept {
  change([](cut_word& word) { word.next_epoch(); });
  tell();
}

void cut::need(bool needs) noexcept {
  if (std::exchange(needs_, needs) == needs) {
    return;
  }
  settled_.store(!needs, std::memory_order_relaxed);
  auto const made = change([needs](cut_word& word) {
    word.catching_up = word.catching_up || (needs && word.needed == 0);
    word.needed = static_cast<std::uint8_t>(word.needed + (needs ? 1 : -1));
  });
  if (needs && made.needed == 1) {
    catch_up();
  }
  tell();
}

outcome cut::settle(std::int64_t deadline_ns) noexcept {
  if (settled_.load(std::memory_order_relaxed)) {
    return outcome::granted;
  }
  std::uint64_t owed = 0;
  auto became = wait(deadline_ns, [this, &owed]() -> std::optional<outcome> {
    auto const now = cut_word::unpack(shared_.word.load(std::memory_order_seq_cst));
    owed = now.granted;
    return now.catching_up ? trouble() : outcome::granted;
  });
  if (became == outcome::granted) {
    became = await_debts(owed, deadline_ns);
  }
  if (became == outcome::granted) {
    settled_.store(true, std::memory_order_relaxed);
  }
  return became;
}

/// By whoever was the first to need it, alone: the word does not come back to what it was meanwhile.
/// What has been launched had been arrived at before its rank saw that nobody needed it.
void cut::catch_up() noexcept {
  std::uint64_t farthest = 0;
  for (unsigned rank = 0; rank < ranks_; ++rank) {
    farthest = std::max(farthest,
                        shared_.ranks[rank].arrived.load(std::memory_order_seq_cst) & number_mask);
  }
  change([farthest](cut_word& word) {
    word.granted = std::max(word.granted, farthest);
    word.catching_up = false;
  });
  try_to_grant();
}

void cut::declare_lost(unsigned rank) noexcept {
  std::uint32_t nobody = 0;
  shared_.lost.compare_exchange_strong(nobody, rank + 1, std::memory_order_seq_cst);
  tell();
}

std::optional<unsigned> cut::lost() const noexcept {
  std::uint32_t const found = shared_.lost.load(std::memory_order_acquire);
  return found == 0 ? std::nullopt : std::optional{found - 1};
}

std::optional<cut::difference_found> cut::difference() const noexcept {
  std::uint64_t const found = shared_.differ.load(std::memory_order_acquire);
  if (found == 0) {
    return std::nullopt;
  }
  std::array const ranks{static_cast<unsigned>(found >> 8U & 0xffU),
                         static_cast<unsigned>(found & 0xffU)};
  std::uint64_t const number = (found >> 16U) - 1;
  return difference_found{number, ranks, {call_of(ranks[0], number), call_of(ranks[1], number)}};
}

numbered_call cut::call_of(unsigned rank, std::uint64_t number) const noexcept {
  auto const& call = shared_.ranks[rank % max_ranks].calls[number % remembered_calls];
  return {call[0].load(std::memory_order_acquire), call[1].load(std::memory_order_acquire),
          call[2].load(std::memory_order_acquire), call[3].load(std::memory_order_acquire)};
}

std::vector<unsigned> cut::missing() const {
  std::vector<unsigned> found;
  for (unsigned rank = 0; rank < ranks_; ++rank) {
    if (shared_.ranks[rank].arrived.load(std::memory_order_seq_cst) != arrival(epoch_, number_)) {
      found.push_back(rank);
    }
  }
  return found;
}

/// Whether a rank that is as far as this one, or farther, means the same call by this one's number.
void cut::compare_with(unsigned neighbour) noexcept {
  auto const& theirs = shared_.ranks[neighbour].arrived;
  auto const remembers = [&] {
    std::uint64_t const at = theirs.load(std::memory_order_seq_cst) & number_mask;
    return at >= number_ && at + 1 < number_ + remembered_calls;  // it may be writing the next one
  };
  if (remembers() && call_of(neighbour, number_) != call_of(rank_, number_) && remembers()) {
    declare_different(number_, std::min(rank_, neighbour), std::max(rank_, neighbour));
  }
}

void cut::declare_different(std::uint64_t number, unsigned one, unsigned other) noexcept {
  std::uint64_t none = 0;
  shared_.differ.compare_exchange_strong(none, (number + 1) << 16U | one << 8U | other,
                                         std::memory_order_seq_cst);
  tell();
}

/// Whether all ranks have arrived at what comes after `at`, and mean the same by it.
cut::glance cut::look(cut_word const& at) const noexcept {
  std::uint64_t const wanted = arrival(at.epoch, at.granted + 1);
  for (unsigned rank = 0; rank < ranks_; ++rank) {
    if (shared_.ranks[rank].arrived.load(std::memory_order_seq_cst) != wanted) {
      return {sight::somebody_missing, {}};
    }
  }
  for (unsigned rank = 1; rank < ranks_; ++rank) {
    if (call_of(rank, at.granted + 1) != call_of(0, at.granted + 1)) {
      return {sight::differ, {0, rank}};
    }
  }
  return {sight::all_alike, {}};
}

/// Whoever finds that all have arrived moves the word on. What it has read of the others stays as it is
/// until the word moves: a rank arrives anew when its number is granted or dropped.
void cut::try_to_grant() noexcept {
  std::uint64_t seen = shared_.word.load(std::memory_order_seq_cst);
  for (;;) {
    auto const at = cut_word::unpack(seen);
    if (at.needed == 0 || at.catching_up) {
      return;  // nobody waits, or somebody will look again
    }
    auto const found = look(at);
    if (at.pausing != 0 || found.what != sight::all_alike) {
      // Somebody may have begun or ended a pause, or an epoch, before what was seen.
      if (std::uint64_t const now = shared_.word.load(std::memory_order_seq_cst); now != seen) {
        seen = now;
        continue;
      }
      if (at.pausing != 0 || found.what == sight::somebody_missing) {
        return;
      }
      declare_different(at.granted + 1, found.ranks[0], found.ranks[1]);
      return;
    }
    auto granting = at;
    ++granting.granted;
    if (shared_.word.compare_exchange_strong(seen, granting.pack(), std::memory_order_seq_cst)) {
      tell();
      return;  // nobody can have arrived at the next one
    }
  }
}

void cut::tell() noexcept {
  shared_.turn.fetch_add(1, std::memory_order_seq_cst);
  if (shared_.sleepers.load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, &shared_.turn, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

std::optional<outcome> cut::trouble() const noexcept {
  if (shared_.lost.load(std::memory_order_seq_cst) != 0) {
    return outcome::lost;
  }
  return shared_.differ.load(std::memory_order_seq_cst) != 0 ? std::optional{outcome::differs}
                                                             : std::nullopt;
}

template <typename Ask>
outcome cut::wait(std::int64_t deadline_ns, Ask ask) noexcept {
  std::int64_t const asleep_from = monotonic_ns() + awake.count();
  for (;;) {
    std::uint32_t const seen = shared_.turn.load(std::memory_order_seq_cst);
    if (auto const known = ask()) {
      return *known;
    }
    std::int64_t const now = monotonic_ns();
    if (now >= deadline_ns) {
      return outcome::late;
    }
    if (now < asleep_from) {
      ::sched_yield();
      continue;
    }
    shared_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    sleep_while(
        shared_.turn, seen,
        std::min<std::chrono::nanoseconds>(nap, std::chrono::nanoseconds{deadline_ns - now}));
    shared_.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace sluice::nccl_shim
