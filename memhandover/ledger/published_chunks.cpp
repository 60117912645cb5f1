#include "memhandover/ledger/published_chunks.hpp"

#include <algorithm>

namespace sluice::memhandover {

std::vector<std::uint32_t> chunks_of(manifest_entry const& entry) {
  std::vector<std::uint32_t> chunks;
  chunks.reserve(entry.chunks.size());
  for (auto const& each : entry.chunks) {
    chunks.push_back(each.chunk);
  }
  return chunks;
}

bool is_left(ledger_view const& view, manifest_entry const& entry, std::uint32_t slot) {
  auto const& header = view.header();
  auto const in_chunks = entry.chunks.size() * header.chunk_bytes;
  return !entry.chunks.empty() && entry.offset < header.chunk_bytes && entry.bytes <= in_chunks &&
         entry.offset + entry.bytes <= in_chunks &&
         std::all_of(entry.chunks.begin(), entry.chunks.end(), [&](chunk_epoch const& each) {
           if (each.chunk >= header.chunk_count) {
             return false;
           }
           auto const state = view.chunk(each.chunk);
           return state.who == owner::serving && state.epoch == each.epoch &&
                  (state.client == left_slot || state.client == slot);
         });
}

std::uint32_t leave_published(ledger_view const& view, manifest const& published,
                              ledger_writer& writer, std::uint32_t slot, std::int64_t until_ns) {
  std::uint32_t left = 0;
  for (auto const& entry : published.entries()) {
    if (is_left(view, entry, slot)) {
      left += writer.leave(chunks_of(entry), static_cast<std::uint16_t>(slot));
    }
  }
  auto const until = static_cast<std::uint64_t>(until_ns);
  auto& stays = view.header().left_until_ns;
  if (left > 0 ||
      stays.load(std::memory_order_acquire) > until) {  // it had held what was left to it
    stays.store(until, std::memory_order_release);
  }
  return left;
}

}  // namespace sluice::memhandover
