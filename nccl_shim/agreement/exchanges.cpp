#include "nccl_shim/agreement/exchanges.hpp"

#include <algorithm>
#include <utility>

namespace sluice::nccl_shim {
namespace {

constexpr unsigned sends_shift = 32;

constexpr std::uint32_t sends_of(std::uint64_t made) {
  return static_cast<std::uint32_t>(made >> sends_shift);
}
constexpr std::uint32_t receives_of(std::uint64_t made) {
  return static_cast<std::uint32_t>(made);
}
/// Of counts that may have begun again at zero, and are never far apart.
constexpr bool is_less(std::uint32_t one, std::uint32_t other) {
  return static_cast<std::int32_t>(one - other) < 0;
}

/// What a count becomes by more of either, which do not run into each other.
constexpr std::uint64_t with_more(std::uint64_t made, std::uint32_t sends, std::uint32_t receives) {
  return std::uint64_t{sends_of(made) + sends} << sends_shift |
         static_cast<std::uint32_t>(receives_of(made) + receives);
}

}  // namespace

void add(std::vector<transfers>& all, transfers const& more) {
  auto const at = std::ranges::lower_bound(all, more.peer, {}, &transfers::peer);
  if (at == all.end() || at->peer != more.peer) {
    all.insert(at, more);
    return;
  }
  at->sends += more.sends;
  at->receives += more.receives;
}

void exchanges::take_place(std::uint32_t place) noexcept {
  shared_.ranks[rank_].place.store(place, std::memory_order_seq_cst);
}

lacking exchanges::lacks(std::span<transfers const> all) const {
  std::vector<unsigned> missing;
  for (transfers const& more : all) {
    if (more.peer == rank_ || more.peer >= ranks_) {  // NCCL refuses the latter
      continue;
    }
    std::uint64_t const own = with_more(made_by(rank_, more.peer), more.sends, more.receives);
    std::uint64_t const theirs = made_by(more.peer, rank_);
    bool const sends_wait = more.sends != 0 && is_less(receives_of(theirs), sends_of(own));
    bool const receives_wait = more.receives != 0 && is_less(sends_of(theirs), receives_of(own));
    if (sends_wait || receives_wait) {
      missing.push_back(more.peer);
    }
  }
  return places_of(std::move(missing));
}

std::vector<unsigned> exchanges::others() const {
  std::vector<unsigned> found;
  for (unsigned rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_) {
      found.push_back(rank);
    }
  }
  return found;
}

lacking exchanges::places_of(std::vector<unsigned> ranks) const {
  lacking result{std::move(ranks)};
  for (unsigned const rank : result.ranks) {
    std::uint32_t const place = shared_.ranks[rank].place.load(std::memory_order_seq_cst);
    result.all_have_one = result.all_have_one && place != 0;
    result.places |= place != 0 ? std::uint32_t{1} << (place - 1) : 0;
  }
  return result;
}

void exchanges::begin_passing() noexcept {
  shared_.ranks[rank_].passing.fetch_add(1, std::memory_order_seq_cst);
}

void exchanges::end_passing() noexcept {
  shared_.ranks[rank_].passing.fetch_sub(1, std::memory_order_seq_cst);
}

void exchanges::made(std::span<transfers const> all) noexcept {
  for (transfers const& more : all) {
    if (more.peer < ranks_) {
      shared_.ranks[rank_].made[more.peer].store(
          with_more(made_by(rank_, more.peer), more.sends, more.receives),
          std::memory_order_seq_cst);
    }
  }
}

bool exchanges::lags() const noexcept {
  for (unsigned peer = 0; peer < ranks_; ++peer) {
    if (peer == rank_) {
      continue;
    }
    std::uint64_t const own = made_by(rank_, peer);
    std::uint64_t const theirs = made_by(peer, rank_);
    if (is_less(receives_of(own), sends_of(theirs)) ||
        is_less(sends_of(own), receives_of(theirs))) {
      return true;
    }
  }
  return false;
}

bool exchanges::others_are_passing() const noexcept {
  for (unsigned peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_ && shared_.ranks[peer].passing.load(std::memory_order_seq_cst) != 0) {
      return true;
    }
  }
  return false;
}

}  // namespace sluice::nccl_shim
