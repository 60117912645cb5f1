/// How many of a pool's chunks each owner has, as the ledger says at present.
///
///   auto const counted = count_chunks(view);
///   counted.serving - counted.left;         // what a living server has
///   counted.by_client.at(slot);             // what the client in `slot` has
///
/// Each word is read once, so that every chunk is counted for one owner; the words of several chunks change meanwhile. The
/// counts of all owners add up to the pool's chunks, but for those that are damaged: an owner that there is not is not counted.
///
/// Thread-safety: any thread; reads shared memory alone.
#pragma once

#include <array>
#include <cstdint>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

struct chunk_counts {
  std::uint32_t free = 0;
  std::uint32_t dirty = 0;
  std::uint32_t training = 0;
  std::uint32_t serving = 0;
  std::uint32_t engine = 0;
  std::uint32_t left = 0;                              ///< of those serving: their server is dead
  std::array<std::uint32_t, max_clients> by_client{};  ///< of those that are somebody's, by slot

  [[nodiscard]] std::uint32_t nobodys() const noexcept { return free + dirty; }
  void add(chunk_state const& state) noexcept;
};

[[nodiscard]] chunk_counts count_chunks(ledger_view const& view) noexcept;

/// The same; `each` is called with every chunk's index and the word that was counted.
template <typename Each>
[[nodiscard]] chunk_counts count_chunks(ledger_view const& view, Each const& each) {
  chunk_counts counted;
  for (std::uint32_t chunk = 0; chunk < view.header().chunk_count; ++chunk) {
    auto const state = view.chunk(chunk);
    counted.add(state);
    each(chunk, state);
  }
  return counted;
}

}  // namespace sluice::memhandover
