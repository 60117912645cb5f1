#include "memhandover/client/detail/server_manifest.hpp"

#include <algorithm>
#include <limits>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/ledger/chunk_choice.hpp"
#include "memhandover/ledger/published_chunks.hpp"

namespace sluice::memhandover::detail {

static_assert(max_warm_key == max_manifest_key);

server_manifest::server_manifest(int fd, parts of)
    : of_(std::move(of)),
      manifest_(fd, of_.view.header().chunk_count, shared_segment::access::read_write),
      claims_(of_.view.header().chunk_count) {}

void server_manifest::publish(std::string_view key, std::byte const* data, std::uint64_t bytes,
                              std::span<std::byte const> blob) {
  auto const& header = of_.view.header();
  manifest_entry entry;
  entry.key = key;
  entry.bytes = bytes;
  entry.blob.assign(blob.begin(), blob.end());
  std::lock_guard const lock{of_.mutex};
  std::vector<std::uint32_t> chunks;
  auto add = [&](std::uint64_t at, auto&& chunk_at) {
    entry.offset = at % header.chunk_bytes;
    auto const last = (at + std::max<std::uint64_t>(bytes, 1) - 1) / header.chunk_bytes;
    for (auto i = at / header.chunk_bytes; i <= last; ++i) {
      chunks.push_back(chunk_at(i));
    }
  };
  auto const whole_bytes = header.chunk_bytes * header.chunk_count;
  if (data >= of_.whole && data < of_.whole + whole_bytes &&
      bytes <= static_cast<std::uint64_t>(of_.whole + whole_bytes - data)) {
    add(static_cast<std::uint64_t>(data - of_.whole),
        [](std::uint64_t i) { return static_cast<std::uint32_t>(i); });
  } else if (auto next = stitched_.upper_bound(data); next != stitched_.begin()) {
    auto const& [start, mapped] = *--next;
    auto const at = static_cast<std::uint64_t>(data - start);
    if (at < mapped.size() * header.chunk_bytes &&
        bytes <= mapped.size() * header.chunk_bytes - at) {
      add(at, [&mapped = mapped](std::uint64_t i) { return mapped[i]; });
    }
  }
  for (auto const chunk : chunks) {
    if (auto const held = held_here(chunk)) {
      entry.chunks.push_back(*held);
    }
  }
  if (chunks.empty() || entry.chunks.size() < chunks.size()) {
    throw error{error_kind::invalid_argument, format_bytes(bytes) + " are to be published as \"" +
                                                  entry.key +
                                                  "\" but do not lie in a placement of this pool"};
  }
  publish(entry);
}

void server_manifest::publish_chunks(std::string_view key, std::span<std::uint32_t const> chunks,
                                     std::span<std::byte const> blob) {
  manifest_entry entry;
  entry.key = key;
  entry.bytes = chunks.size() * of_.view.header().chunk_bytes;
  entry.blob.assign(blob.begin(), blob.end());
  std::lock_guard const lock{of_.mutex};
  for (auto const chunk : chunks) {
    auto const held = held_here(chunk);
    if (!held) {
      throw error{error_kind::invalid_argument, "chunk " + std::to_string(chunk) +
                                                    " is to be published as \"" + entry.key +
                                                    "\" but is not this server's"};
    }
    entry.chunks.push_back(*held);
  }
  publish(entry);
}

std::optional<chunk_epoch> server_manifest::held_here(std::uint32_t chunk) const {
  auto const state = of_.view.chunk(chunk);
  return state.who == owner::serving && state.client == of_.slot
             ? std::optional{chunk_epoch{chunk, state.epoch}}
             : std::nullopt;
}

/// With the mutex held.
void server_manifest::publish(manifest_entry const& entry) {
  manifest_place place{};
  try {
    place = manifest_.publish(entry);
  } catch (error const& full) {
    if (full.kind() != error_kind::out_of_memory || prune() == 0) {
      throw;
    }
    place = manifest_.publish(entry);
  }
  own_.insert_or_assign(entry.key, publication{chunks_of(entry), place});
}

void server_manifest::set_in_use(std::string_view key, bool used) {
  std::lock_guard const lock{of_.mutex};
  if (auto const mine = own_.find(key); mine != own_.end()) {
    manifest_.set_in_use(mine->second.place, used);
  }
}

/// Removes what names memory that has become something else; returns how many entries.
std::size_t server_manifest::prune() {
  std::size_t removed = 0;
  for (auto const& entry : manifest_.entries()) {
    bool const stands =
        std::all_of(entry.chunks.begin(), entry.chunks.end(), [this](chunk_epoch const& each) {
          return each.chunk < of_.view.header().chunk_count &&
                 of_.view.chunk(each.chunk).who == owner::serving &&
                 of_.view.chunk(each.chunk).epoch == each.epoch;
        });
    if (!stands) {
      manifest_.withdraw(entry.key);
      ++removed;
    }
  }
  return removed;
}

void server_manifest::withdraw(std::string_view key) {
  std::lock_guard const lock{of_.mutex};
  if (auto const mine = own_.find(key); mine != own_.end()) {
    manifest_.withdraw(key);
    own_.erase(mine);
  }
}

/// Entries that a predecessor has published, still whole, and not claimed.
std::vector<manifest_entry> server_manifest::left_entries() const {
  auto entries = manifest_.entries();
  std::erase_if(entries, [this](manifest_entry const& entry) {
    return own_.count(entry.key) > 0 || !is_left(of_.view, entry, of_.slot);
  });
  return entries;
}

std::vector<inheritance> server_manifest::inherited() const {
  std::lock_guard const lock{of_.mutex};
  std::vector<inheritance> result;
  for (auto& entry : left_entries()) {
    result.push_back({std::move(entry.key), entry.bytes, std::move(entry.blob)});
  }
  return result;
}

std::optional<manifest_entry> server_manifest::left_under(std::string_view key) const {
  for (auto& entry : left_entries()) {
    if (entry.key == key) {
      return std::move(entry);
    }
  }
  return std::nullopt;
}

std::optional<claimed_chunks> server_manifest::claim_chunks(std::string_view key) {
  std::lock_guard const lock{of_.mutex};
  auto entry = left_under(key);
  if (!entry) {
    return std::nullopt;
  }
  claimed_chunks result{chunks_of(*entry), std::move(entry->blob), entry->in_use};
  own_.emplace(entry->key, publication{result.chunks, entry->place});
  of_.writer->claim(result.chunks, static_cast<std::uint16_t>(of_.slot));
  return result;
}

void server_manifest::hold_left() {
  std::lock_guard const lock{of_.mutex};
  if (of_.writer->left_chunks() > 0) {
    of_.view.header().left_until_ns.store(
        static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()),
        std::memory_order_release);
  }
}

placement server_manifest::claim(std::string_view key) {
  std::unique_lock lock{of_.mutex};
  auto const entry = left_under(key);
  if (!entry) {
    return {};
  }
  auto const chunks = chunks_of(*entry);
  auto const count = static_cast<std::uint32_t>(chunks.size());
  bool const stitched = !are_neighbours(chunks);
  auto* base = of_.whole + chunks.front() * of_.view.header().chunk_bytes;
  if (stitched) {
    base = of_.memory.map_anew(chunks);
    stitched_.insert_or_assign(base, chunks);
  }
  of_.writer->claim(chunks, static_cast<std::uint16_t>(of_.slot));
  for (auto const chunk : chunks) {
    ++claims_.at(chunk);
  }
  own_.insert_or_assign(entry->key, publication{chunks, entry->place});
  auto give_it_back = [this, server = of_.hold(), chunks, stitched, base, count](void*) {
    if (stitched) {
      {
        std::lock_guard const again{of_.mutex};
        stitched_.erase(base);  // before others may get these addresses
      }
      of_.memory.unmap_and_release(base, count);
    }
    std::lock_guard const again{of_.mutex};
    give_claimed_back(chunks);
  };
  placement result{std::shared_ptr<void>{nullptr, std::move(give_it_back)}, base + entry->offset,
                   entry->bytes};
  lock.unlock();
  of_.claimed(chunks, base, key);
  return result;
}

/// A claimed chunk may be part of several entries, and goes back with the last of them.
void server_manifest::give_claimed_back(std::vector<std::uint32_t> const& chunks) {
  std::vector<std::uint32_t> last;
  for (auto const chunk : chunks) {
    if (--claims_.at(chunk) == 0) {
      last.push_back(chunk);
    }
  }
  withdraw_all_in(last);
  of_.writer->give_back(last);
}

void server_manifest::release(std::string_view key) {
  std::lock_guard const lock{of_.mutex};
  for (auto const& entry : left_entries()) {
    if (entry.key == key) {
      forget_left(entry);
      return;
    }
  }
}

void server_manifest::release_rest() {
  std::lock_guard const lock{of_.mutex};
  for (auto const& entry : left_entries()) {
    forget_left(entry);
  }
  of_.writer->release_left(of_.writer->left_chunks());
}

void server_manifest::forget_left(manifest_entry const& entry) {
  manifest_.withdraw(entry.key);
  std::vector<bool> shared(of_.view.header().chunk_count);
  for (auto const& other : left_entries()) {
    for (auto const& each : other.chunks) {
      shared[each.chunk] = true;
    }
  }
  auto chunks = chunks_of(entry);
  std::erase_if(chunks, [&](std::uint32_t chunk) {
    return shared[chunk] || of_.view.chunk(chunk).client != left_slot;
  });
  of_.writer->give_back(chunks);
}

void server_manifest::note_stitched(std::byte const* data, std::vector<std::uint32_t> chunks) {
  stitched_.insert_or_assign(data, std::move(chunks));
}

void server_manifest::forget_stitched(std::byte const* data) {
  stitched_.erase(data);
}

void server_manifest::withdraw_all_in(std::span<std::uint32_t const> chunks) {
  std::vector<bool> dying(of_.view.header().chunk_count);
  for (auto const chunk : chunks) {
    dying[chunk] = true;
  }
  for (auto mine = own_.begin(); mine != own_.end();) {
    auto const& key = mine->first;
    auto const& named = mine->second.chunks;
    bool const goes =
        std::any_of(named.begin(), named.end(), [&](std::uint32_t chunk) { return dying[chunk]; });
    if (goes) {
      manifest_.withdraw(key);
      mine = own_.erase(mine);
    } else {
      ++mine;
    }
  }
}

std::optional<std::int64_t> server_manifest::end_grace() {
  if (!of_.writer || of_.writer->left_chunks() == 0) {
    return std::nullopt;
  }
  auto const until =
      static_cast<std::int64_t>(of_.view.header().left_until_ns.load(std::memory_order_acquire));
  if (monotonic_ns() < until) {
    return until;
  }
  for (auto const& entry : left_entries()) {
    manifest_.withdraw(entry.key);
  }
  of_.writer->release_left(of_.writer->left_chunks());
  return std::nullopt;
}

void server_manifest::end() {
  for (auto const& mine : own_) {
    manifest_.withdraw(mine.first);
  }
  own_.clear();
}

}  // namespace sluice::memhandover::detail
