#include "memhandover/ledger/chunk_history.hpp"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "memhandover/base/shared_text.hpp"

namespace sluice::memhandover {
namespace {

/// Mappings of a client that are kept however old they are: the other half tells what happened.
constexpr std::size_t most_holding = history_entries / 2;

}  // namespace

chunk_history::chunk_history(ledger_view const& view, std::uint32_t slot)
    : view_(view),
      slot_(slot),
      pid_(static_cast<std::uint32_t>(::getpid())),
      client_(view.clients()[slot].kind.load()) {
  for (auto const& entry : view_.history(slot_)) {
    written_ = std::max(written_, entry.seq.load(std::memory_order_acquire));
  }
}

template <typename Write>
void chunk_history::try_to(Write const& write) noexcept {
  try {
    write();
  } catch (std::bad_alloc const&) {
    last_.kind = chunk_event::reserved;  // which nothing continues
  }
}

void chunk_history::record(chunk_event kind, std::span<std::uint32_t const> chunks, void const* at,
                           std::uint64_t generation, std::string_view what) noexcept {
  auto const now = monotonic_ns();
  auto const chunk_bytes = view_.header().chunk_bytes;
  auto const address = reinterpret_cast<std::uint64_t>(at);
  for (std::size_t i = 0; i < chunks.size();) {
    auto end = i + 1;
    while (end < chunks.size() && chunks[end] == chunks[end - 1] + 1) {
      ++end;
    }
    try_to([&] {
      append({0, kind, now, now, at == nullptr ? 0 : address + i * chunk_bytes, generation, 0,
              chunks[i], static_cast<std::uint32_t>(end - i), std::string{what}});
    });
    i = end;
  }
}

void chunk_history::record_reserved(void const* base, std::uint32_t count, std::uint64_t generation,
                                    std::string_view what) noexcept {
  auto const now = monotonic_ns();
  try_to([&] {
    append({0, chunk_event::reserved, now, now, reinterpret_cast<std::uint64_t>(base), generation,
            0, no_chunk, count, std::string{what}});
  });
}

bool chunk_history::continues_last(chunk_record const& entry) const {
  return entry.kind == chunk_event::mapped && last_.kind == chunk_event::mapped &&
         entry.generation == last_.generation && entry.what == last_.what &&
         entry.first == last_.first + last_.count &&
         entry.address == last_.address + last_.count * view_.header().chunk_bytes;
}

void chunk_history::append(chunk_record const& entry) {
  auto const places = view_.history(slot_);
  if (continues_last(entry)) {
    auto& place = places[written_ % places.size()];
    last_.count += entry.count;
    if (!holding_.empty() && holding_.back().seq == written_) {
      holding_.back().count = last_.count;
      holding_.back().until_ns = entry.until_ns;
    }
    place.until_ns.store(entry.until_ns, std::memory_order_relaxed);
    place.count.store(last_.count, std::memory_order_release);
    return;
  }
  keep_what_holds();
  put(entry);
  last_ = entry;
  if (entry.kind == chunk_event::mapped) {
    holding_.push_back(entry);
    holding_.back().seq = written_;
    if (holding_.size() > most_holding) {
      holding_.pop_front();
    }
  } else if (entry.kind == chunk_event::unmapped || entry.kind == chunk_event::revoked) {
    end_what_held(entry);
  }
}

/// Where the next place is that of a mapping which still holds, that gets a new number, and the place
/// after it is the next one.
void chunk_history::keep_what_holds() {
  auto const size = view_.history(slot_).size();
  while (!holding_.empty() && holding_.front().seq + size == written_ + 1) {
    auto kept = holding_.front();
    holding_.pop_front();
    put(kept);
    kept.seq = written_;
    holding_.push_back(std::move(kept));
  }
}

/// A mapping ends from its last chunk on; what lies before `ending` goes on.
void chunk_history::end_what_held(chunk_record const& ending) {
  auto const bytes = view_.header().chunk_bytes;
  std::erase_if(holding_, [&](chunk_record& held) {
    auto const end = held.address + held.count * bytes;
    if (ending.address >= end || ending.address + ending.count * bytes <= held.address) {
      return false;
    }
    held.count = ending.address <= held.address
                     ? 0
                     : static_cast<std::uint32_t>((ending.address - held.address) / bytes);
    return held.count == 0;
  });
}

void chunk_history::put(chunk_record const& entry) {
  auto const places = view_.history(slot_);
  auto& place = places[++written_ % places.size()];
  // Whoever reads meanwhile finds another number afterwards, and leaves the entry out.
  place.seq.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  place.kind.store(static_cast<std::uint32_t>(entry.kind), std::memory_order_relaxed);
  place.from_ns.store(entry.from_ns, std::memory_order_relaxed);
  place.until_ns.store(entry.until_ns, std::memory_order_relaxed);
  place.address.store(entry.address, std::memory_order_relaxed);
  place.generation.store(entry.generation, std::memory_order_relaxed);
  place.pid.store(pid_, std::memory_order_relaxed);
  place.first.store(entry.first, std::memory_order_relaxed);
  place.count.store(entry.count, std::memory_order_relaxed);
  place.client.store(client_, std::memory_order_relaxed);
  store_text(place.what, entry.what);
  place.seq.store(written_, std::memory_order_release);
}

std::vector<chunk_record> read_history(ledger_view const& view, std::uint32_t slot) {
  std::vector<chunk_record> found;
  for (auto const& place : view.history(slot)) {
    auto const seq = place.seq.load(std::memory_order_acquire);
    if (seq == 0) {
      continue;
    }
    chunk_record entry{seq,
                       static_cast<chunk_event>(place.kind.load(std::memory_order_relaxed)),
                       place.from_ns.load(std::memory_order_relaxed),
                       place.until_ns.load(std::memory_order_relaxed),
                       place.address.load(std::memory_order_relaxed),
                       place.generation.load(std::memory_order_relaxed),
                       place.pid.load(std::memory_order_relaxed),
                       place.first.load(std::memory_order_relaxed),
                       place.count.load(std::memory_order_relaxed),
                       load_text(place.what),
                       place.client.load(std::memory_order_relaxed)};
    std::atomic_thread_fence(std::memory_order_acquire);
    if (place.seq.load(std::memory_order_relaxed) == seq) {
      found.push_back(std::move(entry));
    }
  }
  std::sort(found.begin(), found.end(), [](auto const& a, auto const& b) { return a.seq < b.seq; });
  return found;
}

}  // namespace sluice::memhandover
