/// What has become of a client's chunks and addresses: a bounded history in its mailbox, which
/// outlives the process. `sluice pool show --address` reads it, say after a fault.
///
///   tenant     reserved ──► mapped ──► unmapped │ revoked ──► given      (to the ledger's writer)
///   server     taken
///
/// The newest `history_entries` stay, and beside them the older mappings that still hold, or the job
/// that keeps its weights for days would soon be unknown at their addresses. Mappings that continue
/// the one before, in chunks and addresses, are one entry with it.
///
/// It only tells, often between two halves of a change: where there is no memory for an entry, it is left out.
///
/// Thread-safety: none for writing; the owner serialises calls. Anybody may read at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

/// An entry as it was read.
struct chunk_record {
  std::uint64_t seq = 0;  ///< orders the entries of a slot
  chunk_event kind{};
  std::int64_t from_ns = 0;   ///< CLOCK_MONOTONIC
  std::int64_t until_ns = 0;  ///< of the last that the entry tells of
  std::uint64_t address = 0;  ///< of the first chunk; 0: said without one
  std::uint64_t generation = 0;
  std::uint32_t pid = 0;
  std::uint32_t first = 0;  ///< chunks [first, first + count); `no_chunk` for `reserved`
  std::uint32_t count = 0;
  std::string what;          ///< "arena", "persistent", a model's name
  std::uint32_t client = 0;  ///< `client_kind` of whose entry it is

  [[nodiscard]] bool has_chunk(std::uint32_t chunk) const noexcept {
    return first != no_chunk && chunk >= first && chunk - first < count;
  }
  [[nodiscard]] bool has_address(std::uint64_t at, std::uint64_t chunk_bytes) const noexcept {
    return address != 0 && at >= address && at - address < count * chunk_bytes;
  }
};

class chunk_history {
 public:
  /// Goes on behind what earlier clients in `slot`, which is this process's, have left. `view` must
  /// outlive this object.
  chunk_history(ledger_view const& view, std::uint32_t slot);

  /// `chunks` lie, or lay, one behind the other from `at` on (null: said without addresses).
  void record(chunk_event kind, std::span<std::uint32_t const> chunks, void const* at = nullptr,
              std::uint64_t generation = 0, std::string_view what = {}) noexcept;
  /// Addresses for `count` chunks have been reserved, with nothing behind them yet.
  void record_reserved(void const* base, std::uint32_t count, std::uint64_t generation,
                       std::string_view what) noexcept;

 private:
  template <typename Write>
  void try_to(Write const& write) noexcept;
  void append(chunk_record const& entry);
  void put(chunk_record const& entry);
  void keep_what_holds();
  void end_what_held(chunk_record const& ending);
  [[nodiscard]] bool continues_last(chunk_record const& entry) const;

  ledger_view const& view_;
  std::uint32_t slot_;
  std::uint32_t pid_;
  std::uint32_t client_;  ///< `client_kind`
  std::uint64_t written_ = 0;
  chunk_record last_;
  std::deque<chunk_record> holding_;  ///< mappings that have not ended, by `seq`
};

/// The history of a slot, the oldest first.
[[nodiscard]] std::vector<chunk_record> read_history(ledger_view const& view, std::uint32_t slot);

}  // namespace sluice::memhandover
