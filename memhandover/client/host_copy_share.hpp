/// A client's side of the host copies: the table, the bytes of all slots, and who it is in the table.
///
/// Neither mapping is a forked child's: what it parked would be its parent's.
///
///   auto const taken = share.copies().hold(1, share.holder());
///   auto const where = share.at(taken.front().slot);
///
/// Thread-safety: all functions from any thread; the bytes of a slot are whose word says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>

#include "memhandover/ledger/host_copy_table.hpp"

namespace sluice::memhandover {

class host_copy_share {
 public:
  /// Maps both; `said` is what the broker's `joined` says of them. Throws `internal` if that is not what
  /// has come, as `host_copy_table`, or why they cannot be mapped.
  host_copy_share(host_copy_files files, nlohmann::json const& said);

  [[nodiscard]] host_copy_files const& files() const noexcept { return files_; }
  [[nodiscard]] host_copies& copies() noexcept { return table_.copies(); }
  [[nodiscard]] host_copies const& copies() const noexcept { return table_.copies(); }
  [[nodiscard]] host_copies_shape const& shape() const noexcept { return table_.shape(); }
  /// Bytes, from the first slot on, whose pages are there, if the table is to be believed.
  [[nodiscard]] std::uint64_t populated() const noexcept {
    return table_.header().populated.load();
  }
  [[nodiscard]] std::uint16_t holder() const noexcept { return holder_; }
  /// Where a slot's bytes are. Throws `invalid_argument` for one that there is not.
  [[nodiscard]] std::span<std::byte> at(std::uint32_t slot) const;

 private:
  host_copy_files files_;
  host_copy_table table_;
  shared_segment bytes_;
  std::uint16_t holder_;
};

}  // namespace sluice::memhandover
