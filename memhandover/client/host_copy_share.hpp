/// A client's side of the host copies: the table, the bytes of all slots, and who it is in the table.
///
/// What lies on a disk comes and goes by way of `staging`, memory of this process alone.
///
/// No mapping is a forked child's: what it parked would be its parent's.
///
///   auto const taken = share.copies().hold(1, share.holder());
///   auto const where = share.at(taken.front().slot);
///
/// Thread-safety: all functions from any thread; the bytes of a slot are whose word says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "memhandover/device/disk_file.hpp"
#include "memhandover/ledger/host_copy_table.hpp"

namespace sluice::memhandover {

class host_copy_share {
 public:
  /// Chunks that `staging` has room for: one is on its way to the disk or from it, the other between here and the device.
  static constexpr std::uint32_t staged = 2;

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
  /// Where the bytes of a slot in memory are. Throws `invalid_argument` for one that there is not.
  [[nodiscard]] std::span<std::byte> at(std::uint32_t slot) const;
  /// Null where all slots are in memory.
  [[nodiscard]] disk_file* disk() noexcept { return disk_ ? &*disk_ : nullptr; }
  /// Where in that file a slot begins, in bytes. Throws `invalid_argument` for one that is not on the disk.
  [[nodiscard]] std::uint64_t disk_offset(std::uint32_t slot) const;
  /// Whole pages, `staged` slots of them; empty without a disk.
  [[nodiscard]] std::span<std::byte> staging() const noexcept {
    return {staging_.get(), staging_.get_deleter().bytes};
  }

 private:
  struct unmapping {
    std::size_t bytes;
    void operator()(std::byte* where) const noexcept;
  };

  host_copy_files files_;
  host_copy_table table_;
  shared_segment bytes_;
  std::optional<disk_file> disk_;
  std::unique_ptr<std::byte, unmapping> staging_;
  std::uint16_t holder_;
};

}  // namespace sluice::memhandover
