#include "nccl_shim/agreement/cut.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <span>
#include <utility>

#include "nccl_shim/agreement/clock.hpp"
#include "nccl_shim/agreement/cut_memory.hpp"

namespace sluice::nccl_shim {
namespace {

/// A rank may have died of it that calls differ.
std::optional<outcome> trouble(cut_words::view const& seen) noexcept {
  if (seen.differ != 0) {
    return outcome::differs;
  }
  return seen.lost != 0 ? std::optional{outcome::lost} : std::nullopt;
}

}  // namespace

/// Changes the word as `how` does it, and returns what it has made of it.
template <typename Change>
cut_word cut::change(Change how) noexcept {
  std::uint64_t seen = words_.look().word;
  for (;;) {
    cut_word made = cut_word::unpack(seen);
    how(made);
    if (words_.exchange(seen, made.pack())) {
      return made;
    }
  }
}

void cut::arrive(numbered_call const& what) noexcept {
  ++number_;
  unsaid_ = false;
  if (may_catch_up_.load(std::memory_order_relaxed)) [[unlikely]] {
    auto const now = cut_word::unpack(words_.look().word);
    if (now.catching_up && now.granted < number_) {
      unsaid_ = true;
      to_say_ = what;
      return;
    }
    if (now.needed != 0) {  // it does not begin again while this rank needs it
      may_catch_up_.store(false, std::memory_order_relaxed);
    }
  }
  say(what);
}

void cut::say(numbered_call const& what) noexcept {
  unsaid_ = false;
  // Of two that arrive at the same time one must see the other; and who needs all to be asked sees this
  // arrival, or is seen to need it.
  words_.arrive(arrival(epoch_, number_), what);
  has_arrived();
}

[[gnu::hot]] passing cut::pass(numbered_call const& what) noexcept {
  if (memory_ == nullptr) {
    return passing::refused;
  }
  auto const before = cut_word::unpack(memory_->word.load(std::memory_order_seq_cst));
  if (!memory_->needs_nothing(before)) {
    return passing::refused;
  }
  epoch_ = before.epoch;
  memory_->arrive(rank_, arrival(epoch_, ++number_), what);
  auto const now = cut_word::unpack(memory_->word.load(std::memory_order_seq_cst));
  bool const alike = !memory_->differs(rank_, next_rank(), number_) &&
                     (ranks_ <= 2 || !memory_->differs(rank_, last_rank(), number_));
  if (!alike || !memory_->needs_nothing(now)) {
    has_arrived();
    return passing::unclear;
  }
  return passing::passed;
}

[[gnu::hot]] void cut::prepare_to_pass() const noexcept {
  if (memory_ == nullptr) {
    return;
  }
  constexpr int to_write = 1;
  __builtin_prefetch(&memory_->word);
  __builtin_prefetch(&memory_->ranks[rank_], to_write);
  __builtin_prefetch(&memory_->slot_of(next_rank(), number_ + 1));
  __builtin_prefetch(&memory_->slot_of(last_rank(), number_ + 1));
}

void cut::has_arrived() noexcept {
  auto const now = cut_word::unpack(words_.look().word);
  if (now.needed == 0 || now.granted >= number_) {
    // Nobody compares all ranks' calls, not even those that others have made before this one. If any
    // two ranks differ, then two neighbours do, and the later one of them sees it.
    compare_with(next_rank());
    if (ranks_ > 2) {
      compare_with(last_rank());
    }
  }
  if (now.needed != 0) {
    try_to_grant();
  }
}

outcome cut::await(std::int64_t deadline_ns) noexcept {
  return wait(deadline_ns, [this]() -> std::optional<outcome> {
    auto seen = words_.look();
    if (unsaid_ && !cut_word::unpack(seen.word).catching_up) [[unlikely]] {
      say(to_say_);
      seen = words_.look();
    }
    auto const now = cut_word::unpack(seen.word);
    if (now.granted >= number_) {
      return outcome::granted;
    }
    if (auto const bad = trouble(seen)) {
      // The others have launched what was granted before that, and after the word was read.
      return is_granted() ? outcome::granted : bad;
    }
    if (now.needed == 0) {
      return outcome::granted;
    }
    if (now.epoch != epoch_) {
      epoch_ = now.epoch;
      take_back();
      return outcome::dropped;
    }
    return std::nullopt;
  });
}

[[gnu::hot]] void cut::launched() noexcept {
  if (unsaid_ && is_granted()) [[unlikely]] {
    say(to_say_);  // a pause has found that: neighbours compare it all the same
  }
  memory_ != nullptr ? memory_->launched(rank_, number_) : words_.launched(number_);
}

std::uint64_t cut::pause(bool again) noexcept {
  auto const made = change([again](cut_word& word) {
    ++word.pausing;
    if (again) {
      word.next_epoch();
    }
  });
  if (again) {
    words_.notify();
  }
  return made.granted;
}

outcome cut::await_debts(std::uint64_t up_to, std::int64_t deadline_ns) noexcept {
  return wait(deadline_ns, [this, up_to]() -> std::optional<outcome> {
    return words_.launched() >= up_to ? outcome::granted : trouble(words_.look());
  });
}

void cut::resume() noexcept {
  change([](cut_word& word) { --word.pausing; });
  try_to_grant();
}

void cut::resume_without() noexcept {
  epoch_ = change([this](cut_word& word) {
             --word.pausing;
             if (word.epoch == epoch_) {
               word.next_epoch();
             }
           }).epoch;
  take_back();
  words_.notify();
  try_to_grant();
}

void cut::begin_epoch() noexcept {
  change([](cut_word& word) { word.next_epoch(); });
  words_.notify();
}

void cut::end_epoch(std::uint16_t which) noexcept {
  change([which](cut_word& word) {
    if (word.epoch == which) {
      word.next_epoch();
    }
  });
  words_.notify();
}

/// The leading one's is read after what the exchange expects: this one's has never got farther, so that it does not
/// go back.
void cut::catch_up_with(cut const& leading) noexcept {
  std::uint64_t seen = words_.look().word;
  for (;;) {
    cut_word made = cut_word::unpack(seen);
    auto const epoch = leading.epoch();
    if (std::exchange(made.epoch, epoch) == epoch) {
      return;
    }
    if (words_.exchange(seen, made.pack())) {
      words_.notify();
      return;
    }
  }
}

void cut::resume_without(cut const& leading) noexcept {
  epoch_ = change([&leading](cut_word& word) {
             --word.pausing;
             word.epoch = leading.epoch();
           }).epoch;
  take_back();
  words_.notify();
  try_to_grant();
}

void cut::need(bool needs) noexcept {
  if (std::exchange(needs_, needs) == needs) {
    return;
  }
  resolved_.store(!needs, std::memory_order_relaxed);
  may_catch_up_.store(needs, std::memory_order_relaxed);
  auto const made = change([needs](cut_word& word) {
    word.catching_up = word.catching_up || (needs && word.needed == 0);
    word.needed = static_cast<std::uint8_t>(word.needed + (needs ? 1 : -1));
  });
  if (needs && made.needed == 1) {
    grant_what_was_launched();
  }
  words_.notify();
}

outcome cut::resolve(std::int64_t deadline_ns) noexcept {
  if (resolved_.load(std::memory_order_relaxed)) {
    return outcome::granted;
  }
  std::uint64_t owed = 0;
  auto became = wait(deadline_ns, [this, &owed]() -> std::optional<outcome> {
    auto const seen = words_.look();
    auto const now = cut_word::unpack(seen.word);
    owed = now.granted;
    return now.catching_up ? trouble(seen) : outcome::granted;
  });
  if (became == outcome::granted) {
    became = await_debts(owed, deadline_ns);
  }
  if (became == outcome::granted) {
    resolved_.store(true, std::memory_order_relaxed);
  }
  return became;
}

/// By whoever was the first to need it, alone: the word does not come back to what it was meanwhile.
/// What has been launched had been arrived at before its rank saw that nobody needed it.
void cut::grant_what_was_launched() noexcept {
  std::array<std::uint64_t, max_ranks> arrived{};
  words_.arrivals(std::span{arrived}.first(ranks_));
  std::uint64_t farthest = 0;
  for (std::uint64_t const at : arrived) {
    farthest = std::max(farthest, at & number_mask);
  }
  change([farthest](cut_word& word) {
    word.granted = std::max(word.granted, farthest);
    word.catching_up = false;
  });
  try_to_grant();
}

void cut::declare_lost(unsigned rank) noexcept {
  words_.lose(rank);
  words_.notify();
}

std::optional<unsigned> cut::lost() const noexcept {
  std::uint32_t const found = words_.look().lost;
  return found == 0 ? std::nullopt : std::optional{found - 1};
}

std::optional<cut::difference_found> cut::difference() const noexcept {
  std::uint64_t const found = words_.look().differ;
  if (found == 0) {
    return std::nullopt;
  }
  std::array const ranks{static_cast<unsigned>(found >> 8U & 0xffU),
                         static_cast<unsigned>(found & 0xffU)};
  std::uint64_t const number = (found >> 16U) - 1;
  return difference_found{
      number, ranks, {words_.call_of(ranks[0], number), words_.call_of(ranks[1], number)}};
}

std::vector<unsigned> cut::missing() const {
  std::vector<unsigned> found;
  std::array<std::uint64_t, max_ranks> arrived{};
  words_.arrivals(std::span{arrived}.first(ranks_));
  for (unsigned rank = 0; rank < ranks_; ++rank) {
    if (arrived[rank] != arrival(epoch_, number_)) {
      found.push_back(rank);
    }
  }
  return found;
}

void cut::compare_with(unsigned neighbour) noexcept {
  if (words_.differs(neighbour, number_)) {
    declare_different(number_, std::min(rank_, neighbour), std::max(rank_, neighbour));
  }
}

void cut::declare_different(std::uint64_t number, unsigned one, unsigned other) noexcept {
  words_.differ((number + 1) << 16U | one << 8U | other);
  words_.notify();
}

/// Whoever finds that all have arrived moves the word on. What it has read of the others stays as it is
/// until the word moves: a rank arrives anew when its number is granted or dropped.
void cut::try_to_grant() noexcept {
  std::uint64_t seen = words_.look().word;
  for (;;) {
    auto const at = cut_word::unpack(seen);
    if (at.needed == 0 || at.catching_up) {
      return;  // nobody waits, or somebody will look again
    }
    auto const found = words_.look_at_all(arrival(at.epoch, at.granted + 1));
    if (at.pausing != 0 || found.what != cut_words::sight::all_alike) {
      // Somebody may have begun or ended a pause, or an epoch, before what was seen.
      if (std::uint64_t const now = words_.look().word; now != seen) {
        seen = now;
        continue;
      }
      if (at.pausing != 0 || found.what == cut_words::sight::somebody_missing) {
        return;
      }
      declare_different(at.granted + 1, found.ranks[0], found.ranks[1]);
      return;
    }
    auto granting = at;
    ++granting.granted;
    if (words_.exchange(seen, granting.pack())) {
      words_.notify();
      return;  // nobody can have arrived at the next one
    }
  }
}

template <typename Ask>
outcome cut::wait(std::int64_t deadline_ns, Ask ask) noexcept {
  std::int64_t since = 0;
  for (;;) {
    std::uint32_t const seen = words_.turn();
    if (auto const known = ask()) {
      return *known;
    }
    std::int64_t const now = monotonic_ns();
    since = since == 0 ? now : since;
    if (now >= deadline_ns) {
      return outcome::late;
    }
    words_.wait(seen, std::chrono::nanoseconds{now - since},
                std::chrono::nanoseconds{deadline_ns - now});
  }
}

}  // namespace sluice::nccl_shim
