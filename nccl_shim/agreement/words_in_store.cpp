#include "nccl_shim/agreement/words_in_store.hpp"

#include <algorithm>
#include <chrono>
#include <span>
#include <thread>
#include <utility>

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;

/// Between two questions of who waits, at first and later.
constexpr std::chrono::nanoseconds first_pause = 100us;
constexpr std::chrono::nanoseconds longest_pause = 1ms;

template <typename Value>
std::span<std::byte const> bytes_of(Value const& value) {
  return std::as_bytes(std::span{&value, 1});
}

template <typename Value>
std::span<std::byte> room_in(Value& value) {
  return std::as_writable_bytes(std::span{&value, 1});
}

std::string part_key(std::string const& prefix, unsigned rank) {
  return prefix + "part/" + std::to_string(rank);
}

}  // namespace

void words_in_store::make(store& in, std::string const& prefix, unsigned rank) {
  stored_word word;
  static_cast<void>(in.compare_set(prefix + "word", {}, bytes_of(word), room_in(word)));
  stored_part part;
  static_cast<void>(in.compare_set(part_key(prefix, rank), {}, bytes_of(part), room_in(part)));
}

void words_in_store::remove(store& in, std::string const& prefix, unsigned ranks) {
  for (unsigned rank = 0; rank < ranks; ++rank) {
    in.remove(part_key(prefix, rank));
    in.remove(prefix + "calls/" + std::to_string(rank));
  }
  in.remove(prefix + "word");
}

words_in_store::words_in_store(store& in, std::string const& prefix, unsigned rank, unsigned ranks)
    : in_{in},
      word_key_{prefix + "word"},
      calls_prefix_{prefix + "calls/"},
      rank_{rank},
      ranks_{ranks} {
  for (unsigned of = 0; of < ranks; ++of) {
    part_keys_.push_back(part_key(prefix, of));
  }
}

void words_in_store::note_loss_of_store() noexcept {
  last_.lost = last_.lost == 0 ? the_words + 1 : last_.lost;
}

cut_words::view words_in_store::look() noexcept {
  std::lock_guard const guard{asking_};
  stored_word found;
  if (in_.get({&word_key_, 1}, room_in(found))) {
    last_ = found;
  } else {
    note_loss_of_store();
  }
  return {last_.word, static_cast<std::uint32_t>(last_.lost), last_.differ};
}

/// Makes all that was seen last into `made`. False if it has become something else, which is then what was
/// seen last.
bool words_in_store::swap(stored_word made) noexcept {
  made.stamp = std::uint64_t{rank_ + 1} << number_bits | ++stamps_;
  stored_word found;
  if (!in_.compare_set(word_key_, bytes_of(last_), bytes_of(made), room_in(found))) {
    last_ = made;  // there is nobody any more who might have another one
    note_loss_of_store();
    return true;
  }
  last_ = found;
  return found.stamp == made.stamp;
}

bool words_in_store::exchange(std::uint64_t& seen, std::uint64_t made) noexcept {
  std::lock_guard const guard{asking_};
  bool done = false;
  if (last_.word == seen) {
    stored_word next = last_;
    next.word = made;
    done = swap(next);
  }
  seen = done ? seen : last_.word;
  return done;
}

void words_in_store::lose(unsigned rank) noexcept {
  std::lock_guard const guard{asking_};
  for (bool done = false; !done && last_.lost == 0;) {
    stored_word next = last_;
    next.lost = rank + 1;
    done = swap(next);
  }
}

void words_in_store::differ(std::uint64_t differ) noexcept {
  std::lock_guard const guard{asking_};
  for (bool done = false; !done && last_.differ == 0;) {
    stored_word next = last_;
    next.differ = differ;
    done = swap(next);
  }
}

void words_in_store::arrive(std::uint64_t at, numbered_call const& what) noexcept {
  std::lock_guard const guard{asking_};
  own_ = {at, what};
  own_calls_.newest = at & number_mask;
  own_calls_.calls[own_calls_.newest % remembered_calls] = what;
  std::string const calls_key = calls_prefix_ + std::to_string(rank_);
  std::array const all{store::written{calls_key, bytes_of(own_calls_)},
                       store::written{part_keys_[rank_], bytes_of(own_)}};
  in_.set(all);
}

bool words_in_store::read_parts(parts& into) noexcept {
  return in_.get(part_keys_, std::as_writable_bytes(std::span{into}.first(ranks_)));
}

void words_in_store::arrivals(std::span<std::uint64_t> of_ranks) noexcept {
  parts found{};
  if (!read_parts(found)) {
    return;
  }
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    of_ranks[rank] = found.at(rank).arrived;
  }
}

numbered_call words_in_store::call_of(unsigned rank, std::uint64_t number) noexcept {
  stored_calls found;
  std::string const key = calls_prefix_ + std::to_string(rank);
  static_cast<void>(in_.get({&key, 1}, room_in(found)));
  return found.calls[number % remembered_calls];
}

cut_words::glance words_in_store::look_at_all(std::uint64_t at) noexcept {
  parts found{};
  if (ranks_ == 2) {  // one question, for the only other one
    unsigned const other = 1 - rank_;
    if (!in_.get({&part_keys_[other], 1}, room_in(found[other]))) {
      return {sight::somebody_missing, {}};
    }
    std::lock_guard const guard{asking_};
    found[rank_] = own_;
  } else if (!read_parts(found)) {
    return {sight::somebody_missing, {}};
  }
  std::span const all{found.data(), ranks_};
  if (std::any_of(all.begin(), all.end(), [at](auto const& part) { return part.arrived != at; })) {
    return {sight::somebody_missing, {}};
  }
  for (unsigned rank = 1; rank < ranks_; ++rank) {
    if (all[rank].what != all[0].what) {
      return {sight::differ, {0, rank}};
    }
  }
  return {sight::all_alike, {}};
}

bool words_in_store::differs(unsigned neighbour, std::uint64_t number) noexcept {
  stored_part theirs;
  if (!in_.get({&part_keys_[neighbour], 1}, room_in(theirs)) ||
      !is_remembered(theirs.arrived, number)) {
    return false;
  }
  if ((theirs.arrived & number_mask) != number) {
    stored_calls found;
    std::string const key = calls_prefix_ + std::to_string(neighbour);
    if (!in_.get({&key, 1}, room_in(found)) || !is_remembered(found.newest, number)) {
      return false;
    }
    theirs.what = found.calls[number % remembered_calls];
  }
  std::lock_guard const guard{asking_};
  return theirs.what != own_.what;
}

void words_in_store::launched(std::uint64_t number) noexcept {
  launched_.store(number, std::memory_order_seq_cst);
}

std::uint64_t words_in_store::launched() noexcept {
  return launched_.load(std::memory_order_seq_cst);
}

void words_in_store::wait(std::uint32_t /*seen*/, std::chrono::nanoseconds waited,
                          std::chrono::nanoseconds at_most) noexcept {
  std::this_thread::sleep_for(std::min(between_looks(waited), at_most));
}

std::chrono::nanoseconds words_in_store::between_looks(
    std::chrono::nanoseconds waited) const noexcept {
  return std::clamp(waited / 8, first_pause, longest_pause);
}

}  // namespace sluice::nccl_shim
