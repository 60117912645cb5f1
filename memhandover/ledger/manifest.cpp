#include "memhandover/ledger/manifest.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <optional>

#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

constexpr std::size_t cell_bytes = 256;
constexpr std::size_t cells_of_any_pool = 16'384;
constexpr std::size_t directory_bytes = max_manifest_entries * sizeof(std::uint64_t);

/// A word of the directory: which cells, and which publication. Zero: no entry.
struct named_cells {
  std::uint32_t generation = 0;
  std::uint16_t first = 0;
  std::uint16_t count = 0;

  [[nodiscard]] std::uint64_t pack() const noexcept {
    return static_cast<std::uint64_t>(generation) << 32U |
           static_cast<std::uint64_t>(first) << 16U | count;
  }
  [[nodiscard]] static named_cells unpack(std::uint64_t word) noexcept {
    return {static_cast<std::uint32_t>(word >> 32U), static_cast<std::uint16_t>(word >> 16U),
            static_cast<std::uint16_t>(word)};
  }
};

/// In front of an entry's chunks, key and blob, which follow in this order.
struct entry_head {
  std::uint64_t in_use = 0;    ///< changes while the entry stands
  std::uint64_t checksum = 0;  ///< of everything behind it
  std::uint32_t generation = 0;
  std::uint32_t key_bytes = 0;
  std::uint32_t chunk_count = 0;
  std::uint32_t blob_bytes = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

std::size_t cells_of(std::uint32_t chunk_count) {
  // Room for every chunk in several entries, beside blobs and keys. First cells have 16 bits.
  return std::min<std::size_t>(65'535, cells_of_any_pool + chunk_count / 4);
}

/// FNV-1a of what stands behind the checksum.
std::uint64_t entry_checksum(std::span<std::byte const> entry) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (auto const byte : entry.subspan(offsetof(entry_head, generation))) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3;
  }
  return hash;
}

void append(std::vector<std::byte>& to, void const* from, std::size_t bytes) {
  auto const* const start = static_cast<std::byte const*>(from);
  to.insert(to.end(), start, start + bytes);
}

std::vector<std::byte> packed(manifest_entry const& entry, std::uint32_t generation) {
  entry_head head;
  head.in_use = entry.in_use ? 1 : 0;
  head.generation = generation;
  head.key_bytes = static_cast<std::uint32_t>(entry.key.size());
  head.chunk_count = static_cast<std::uint32_t>(entry.chunks.size());
  head.blob_bytes = static_cast<std::uint32_t>(entry.blob.size());
  head.offset = entry.offset;
  head.bytes = entry.bytes;
  std::vector<std::byte> result;
  append(result, &head, sizeof head);
  append(result, entry.chunks.data(), entry.chunks.size() * sizeof(chunk_epoch));
  append(result, entry.key.data(), entry.key.size());
  append(result, entry.blob.data(), entry.blob.size());
  head.checksum = entry_checksum(result);
  std::memcpy(result.data() + offsetof(entry_head, checksum), &head.checksum, sizeof head.checksum);
  return result;
}

/// The entry in these cells, if it is whole.
std::optional<manifest_entry> unpacked(std::span<std::byte const> cells, std::uint32_t generation) {
  entry_head head;
  std::memcpy(&head, cells.data(), sizeof head);
  auto const chunk_bytes = static_cast<std::size_t>(head.chunk_count) * sizeof(chunk_epoch);
  auto const size = sizeof head + chunk_bytes + head.key_bytes + head.blob_bytes;
  if (head.generation != generation || head.key_bytes > max_manifest_key ||
      head.blob_bytes > max_manifest_blob || size > cells.size() ||
      entry_checksum(cells.first(size)) != head.checksum) {
    return std::nullopt;
  }
  manifest_entry entry;
  entry.in_use = head.in_use != 0;
  entry.offset = head.offset;
  entry.bytes = head.bytes;
  entry.chunks.resize(head.chunk_count);
  auto const* at = cells.data() + sizeof head;
  std::memcpy(entry.chunks.data(), at, chunk_bytes);
  at += chunk_bytes;
  entry.key.assign(reinterpret_cast<char const*>(at), head.key_bytes);
  at += head.key_bytes;
  entry.blob.assign(at, at + head.blob_bytes);
  return entry;
}

}  // namespace

/// A word of the directory and the entry that it names.
struct manifest::place {
  std::size_t index = 0;
  std::uint32_t generation = 0;
  manifest_entry entry;
};

std::size_t manifest_bytes(std::uint32_t chunk_count) {
  return directory_bytes + cells_of(chunk_count) * cell_bytes;
}

manifest::manifest(int fd, std::uint32_t chunk_count, shared_segment::access how)
    : segment_(fd, how), cells_(cells_of(chunk_count)) {
  if (segment_.bytes() != manifest_bytes(chunk_count)) {
    throw error{error_kind::internal, "the pool's manifest has " +
                                          std::to_string(segment_.bytes()) +
                                          " bytes, which does not fit its number of chunks"};
  }
}

std::span<std::atomic<std::uint64_t>> manifest::directory() const noexcept {
  return {std::launder(reinterpret_cast<std::atomic<std::uint64_t>*>(segment_.data())),
          max_manifest_entries};
}

std::byte* manifest::cell(std::size_t index) const noexcept {
  return segment_.data() + directory_bytes + index * cell_bytes;
}

/// Every whole entry. One that replaces another is there before the other has gone, so that a key may
/// be there twice.
std::vector<manifest::place> manifest::places() const {
  std::vector<place> found;
  for (std::size_t i = 0; i < max_manifest_entries; ++i) {
    auto const word = directory()[i].load(std::memory_order_acquire);
    auto const named = named_cells::unpack(word);
    if (word == 0 || named.count == 0 ||
        static_cast<std::size_t>(named.first) + named.count > cells_) {
      continue;
    }
    auto entry = unpacked({cell(named.first), named.count * cell_bytes}, named.generation);
    if (!entry) {
      continue;
    }
    entry->place = {i, named.generation};
    found.push_back({i, named.generation, std::move(*entry)});
  }
  return found;
}

std::vector<manifest_entry> manifest::entries() const {
  auto found = places();
  std::sort(found.begin(), found.end(),
            [](place const& a, place const& b) { return a.generation > b.generation; });
  std::vector<manifest_entry> result;
  for (auto& each : found) {
    if (std::none_of(result.begin(), result.end(),
                     [&](manifest_entry const& newer) { return newer.key == each.entry.key; })) {
      result.push_back(std::move(each.entry));
    }
  }
  return result;
}

/// The first of so many neighbouring cells that nothing names.
std::size_t manifest::room_for(std::size_t cells) const {
  std::vector<bool> used(cells_);
  for (auto const& word : directory()) {
    auto const named = named_cells::unpack(word.load(std::memory_order_relaxed));
    for (std::size_t i = named.first;
         i < std::min<std::size_t>(cells_, static_cast<std::size_t>(named.first) + named.count);
         ++i) {
      used[i] = true;
    }
  }
  std::size_t run = 0;
  for (std::size_t i = 0; i < cells_; ++i) {
    run = used[i] ? 0 : run + 1;
    if (run == cells) {
      return i + 1 - cells;
    }
  }
  throw error{error_kind::out_of_memory, "the pool's manifest has no room for another " +
                                             std::to_string(cells * cell_bytes) +
                                             " bytes; publish less, or withdraw something first"};
}

manifest_place manifest::publish(manifest_entry const& entry) {
  if (entry.key.empty() || entry.key.size() > max_manifest_key) {
    throw error{error_kind::invalid_argument,
                "the key of a manifest's entry has " + std::to_string(entry.key.size()) +
                    " bytes, must have 1 to " + std::to_string(max_manifest_key)};
  }
  if (entry.blob.size() > max_manifest_blob) {
    throw error{error_kind::invalid_argument,
                "the blob of a manifest's entry has " + std::to_string(entry.blob.size()) +
                    " bytes, may have " + std::to_string(max_manifest_blob)};
  }
  std::uint32_t generation = 0;
  std::vector<std::size_t> old;
  for (auto const& each : places()) {
    generation = std::max(generation, each.generation);
    if (each.entry.key == entry.key) {
      old.push_back(each.index);
    }
  }
  auto const words = directory();
  auto const empty = std::find_if(words.begin(), words.end(), [](auto const& word) {
    return word.load(std::memory_order_relaxed) == 0;
  });
  if (empty == words.end()) {
    throw error{error_kind::out_of_memory, "the pool's manifest has its " +
                                               std::to_string(max_manifest_entries) +
                                               " entries; withdraw one first"};
  }
  auto const bytes = packed(entry, generation + 1);
  auto const count = (bytes.size() + cell_bytes - 1) / cell_bytes;
  auto const first = room_for(count);
  std::memcpy(cell(first), bytes.data(), bytes.size());
  named_cells const name{generation + 1, static_cast<std::uint16_t>(first),
                         static_cast<std::uint16_t>(count)};
  empty->store(name.pack(), std::memory_order_release);
  for (auto const index : old) {
    words[index].store(0, std::memory_order_release);
  }
  return {static_cast<std::size_t>(empty - words.begin()), generation + 1};
}

void manifest::set_in_use(manifest_place at, bool used) noexcept {
  auto const word_of = directory()[at.index].load(std::memory_order_relaxed);
  auto const named = named_cells::unpack(word_of);
  if (word_of == 0 || named.generation != at.generation) {
    return;
  }
  auto* const word =
      reinterpret_cast<std::uint64_t*>(cell(named.first) + offsetof(entry_head, in_use));
  std::atomic_ref{*word}.store(used ? 1 : 0, std::memory_order_seq_cst);
}

void manifest::withdraw(std::string_view key) {
  for (auto const& each : places()) {
    if (each.entry.key == key) {
      directory()[each.index].store(0, std::memory_order_release);
    }
  }
}

void manifest::clear() {
  for (auto& word : directory()) {
    word.store(0, std::memory_order_release);
  }
}

}  // namespace sluice::memhandover
