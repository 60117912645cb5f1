#include "memhandover/ledger/chunk_choice.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace sluice::memhandover {

bool are_neighbours(std::span<std::uint32_t const> chunks) noexcept {
  return std::adjacent_find(chunks.begin(), chunks.end(),
                            [](auto a, auto b) { return b != a + 1; }) == chunks.end();
}

std::vector<std::uint32_t> choose_chunks_to_give(std::span<std::uint32_t const> own,
                                                 std::vector<bool> const& free,
                                                 std::uint32_t missing) {
  if (missing == 0) {
    return {};
  }
  auto const length =
      missing + static_cast<std::size_t>(std::count(free.begin(), free.end(), true));
  // A window of that length slides over all chunks; [begin, end) are those of `own` in it.
  std::size_t usable = 0;
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t best_begin = 0;
  std::size_t best_count = std::numeric_limits<std::size_t>::max();
  for (std::size_t chunk = 0; chunk < free.size(); ++chunk) {
    bool const is_own = end < own.size() && own[end] == chunk;
    end += is_own ? 1 : 0;
    usable = is_own || free[chunk] ? usable + 1 : 0;
    if (usable < length) {
      continue;
    }
    while (begin < end && own[begin] + length <= chunk) {
      ++begin;
    }
    if (end - begin < best_count) {
      best_begin = begin;
      best_count = end - begin;
    }
  }
  if (best_count > own.size()) {
    best_begin = 0;
    best_count = std::min<std::size_t>(missing, own.size());
  }
  auto const chosen = own.subspan(best_begin, best_count);
  return {chosen.begin(), chosen.end()};
}

}  // namespace sluice::memhandover
