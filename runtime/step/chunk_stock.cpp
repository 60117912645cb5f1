#include "runtime/step/chunk_stock.hpp"

#include <algorithm>

namespace sluice::step {

using memhandover::chunk_space;
using memhandover::lifetime;

chunk_stock::chunk_stock(memhandover::tenant_client& client, memhandover::device_memory& memory)
    : client_(client),
      memory_(memory),
      notes_(client.view(), client.slot()),
      needs_scrub_(client.view().shape().chunk_count) {
  chunks_.reserve(client.view().shape().chunk_count);
}

std::uint32_t chunk_stock::better_in_pool(std::uint32_t needed) const {
  auto const& view = client_.view();
  std::vector<bool> here(view.shape().chunk_count);
  for (auto const chunk : chunks_) {
    here.at(chunk) = true;
  }
  std::uint32_t better = 0;
  std::uint32_t seen = 0;
  for (auto chunk = view.shape().chunk_count; chunk-- > 0 && seen < needed;) {
    bool const free = view.chunk(chunk).is_free();
    better += free ? 1 : 0;
    seen += free || here[chunk] ? 1 : 0;
  }
  return better;
}

bool chunk_stock::beats(std::span<std::uint32_t const> others) const {
  return !chunks_.empty() && !others.empty() &&
         *std::max_element(chunks_.begin(), chunks_.end()) >
             *std::min_element(others.begin(), others.end());
}

void chunk_stock::add(std::span<std::uint32_t const> chunks) noexcept {
  notes_.say(chunks, "spare");
  chunks_.insert(chunks_.end(), chunks.begin(), chunks.end());
}

void chunk_stock::collect() {
  std::vector<std::uint32_t> dirty;
  add(client_.collect(&dirty));
  for (auto const chunk : dirty) {
    needs_scrub_.at(chunk) = true;
  }
}

void chunk_stock::remove(std::span<std::uint32_t const> chunks) noexcept {
  std::erase_if(chunks_, [chunks](std::uint32_t chunk) {
    return std::binary_search(chunks.begin(), chunks.end(), chunk);
  });
}

std::vector<std::uint32_t> chunk_stock::take(std::uint32_t count) {
  std::sort(chunks_.begin(), chunks_.end());
  std::vector<std::uint32_t> taken(chunks_.end() - static_cast<std::ptrdiff_t>(count),
                                   chunks_.end());
  chunks_.resize(chunks_.size() - count);
  return taken;
}

void chunk_stock::map_into(chunk_space& where, std::uint32_t count, lifetime kind) {
  // Neighbours together, so that one mapping covers a run of them.
  std::sort(chunks_.begin(), chunks_.end());
  auto const first = kind == lifetime::lasting ? chunks_.end() - static_cast<std::ptrdiff_t>(count)
                                               : chunks_.begin();
  auto const last = first + static_cast<std::ptrdiff_t>(count);
  std::vector<std::uint32_t> const taken(first, last);
  auto* const at = where.base() + where.chunks().size() * memory_.shape().chunk_bytes;
  where.grow(taken);
  chunks_.erase(first, last);
  try {
    scrub(at, taken, where.holds_private_pages());
  } catch (...) {
    add(where.shrink(count));  // nobody may have it unscrubbed
    throw;
  }
  notes_.say(taken, kind == lifetime::lasting ? "persistent" : "arena");
}

/// Zeroes those of `chunks`, mapped from `at` on, that hold another's contents, or all.
void chunk_stock::scrub(std::byte* at, std::span<std::uint32_t const> chunks, bool all) {
  for (std::size_t i = 0; i < chunks.size();) {
    std::size_t end = i;
    while (end < chunks.size() && (all || needs_scrub_.at(chunks[end]))) {
      ++end;
    }
    if (end > i) {
      memory_.scrub(at + i * memory_.shape().chunk_bytes, chunks.subspan(i, end - i));
      for (; i < end; ++i) {
        needs_scrub_.at(chunks[i]) = false;
      }
    }
    i = end + 1;
  }
}

}  // namespace sluice::step
