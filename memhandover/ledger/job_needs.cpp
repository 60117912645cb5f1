#include "memhandover/ledger/job_needs.hpp"

#include <algorithm>

#include "memhandover/ledger/chunk_counts.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/demand_order.hpp"

namespace sluice::memhandover {
namespace {

/// Of the live training job in `slot`.
std::optional<priority> rank_of(ledger_view const& view, std::uint32_t slot) noexcept {
  auto const& entry = view.clients()[slot];
  auto const* const kind = traits_of_live(entry);
  if (kind == nullptr || kind->kind != client_kind::training) {
    return std::nullopt;
  }
  return standing_of(entry, view.header().chunk_count).rank;
}

/// Chunks that jobs of a higher priority than the one in `slot` need now; 0 where that is none.
std::uint32_t needed_before(ledger_view const& view, std::uint32_t slot) noexcept {
  auto const all = view.header().chunk_count;
  std::uint32_t chunks = 0;
  for (std::uint32_t other = 0; other < max_clients; ++other) {
    if (auto const needed = needed_by(view, other); needed > 0) {
      auto const own = rank_of(view, slot);
      chunks += own && *own < rank_of(view, other) ? std::min(all - chunks, needed) : 0;
    }
  }
  return chunks;
}

}  // namespace

void show_need(mailbox_header& mailbox, std::uint32_t chunks,
               std::chrono::nanoseconds lasts) noexcept {
  mailbox.needed_until_ns.store(monotonic_ns() + lasts.count());
  mailbox.needed_chunks.store(chunks);
}

void withdraw_need(mailbox_header& mailbox) noexcept {
  mailbox.needed_chunks.store(0);
}

bool outranks_another(ledger_view const& view, std::uint32_t slot) noexcept {
  auto const own = rank_of(view, slot);
  for (std::uint32_t other = 0; own && other < max_clients; ++other) {
    if (auto const rank = rank_of(view, other); rank && *rank < *own) {
      return true;
    }
  }
  return false;
}

bool could_have(ledger_view const& view, std::uint32_t slot, std::uint32_t chunks) noexcept {
  auto const own = rank_of(view, slot);
  auto const counted = count_chunks(view);
  auto there = beside_needs(view, slot, view.header().grantable.load(), counted.by_client.at(slot));
  for (std::uint32_t other = 0; other < max_clients; ++other) {
    if (auto const rank = rank_of(view, other); rank && rank < own) {
      auto const standing = standing_of(view.clients()[other], view.header().chunk_count);
      there += giveable_of({.held = counted.by_client.at(other),
                            .kept = view.mailbox(other).kept_chunks.load(),
                            .least = standing.least_chunks})
                   .at_once;
    }
  }
  return there >= chunks;
}

bool waits_behind_another(ledger_view const& view, std::uint32_t slot) noexcept {
  auto const own = rank_of(view, slot);
  for (std::uint32_t other = 0; other < max_clients; ++other) {
    auto const rank = rank_of(view, other);
    if (other != slot && rank && view.mailbox(other).waiting.load() != 0 &&
        (rank > own || (rank == own && other < slot))) {
      return true;
    }
  }
  return false;
}

std::uint32_t needed_by(ledger_view const& view, std::uint32_t slot) noexcept {
  auto const& mailbox = view.mailbox(slot);
  auto const chunks = mailbox.needed_chunks.load();
  return chunks > 0 && monotonic_ns() < mailbox.needed_until_ns.load() && rank_of(view, slot)
             ? std::min(chunks, view.header().chunk_count)
             : 0;
}

std::uint32_t beside_needs(ledger_view const& view, std::uint32_t slot, std::uint32_t chunks,
                           std::uint32_t held) noexcept {
  auto const needed = needed_before(view, slot);
  if (needed == 0) {
    return chunks;
  }
  auto const least = standing_of(view.clients()[slot], view.header().chunk_count).least_chunks;
  return std::max(chunks - std::min(chunks, needed),
                  std::min(chunks, least - std::min(least, held)));
}

std::uint32_t grantable_to(ledger_view const& view, std::uint32_t slot) noexcept {
  auto const chunks = view.header().grantable.load(std::memory_order_seq_cst);
  return needed_before(view, slot) == 0
             ? chunks
             : beside_needs(view, slot, chunks, count_chunks(view).by_client.at(slot));
}

std::optional<std::uint32_t> first_in_need(ledger_view const& view) noexcept {
  std::optional<std::uint32_t> first;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (needed_by(view, slot) > 0 && (!first || rank_of(view, slot) > rank_of(view, *first))) {
      first = slot;
    }
  }
  return first;
}

}  // namespace sluice::memhandover
