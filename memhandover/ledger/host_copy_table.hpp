/// The host copies' shared memory: the bytes, a file for those that lie on a disk, and the table that says who has which slot.
///
///   auto disk = create_disk_file({"/var/lib/sluice", 256_GiB});
///   auto const files = create_host_copies(64_GiB, 64_MiB, std::move(disk));  // the broker
///   host_copy_table table{files};                            // the broker, and each client
///   table.copies().hold(3, holder);
///
/// Thread-safety: `copies` and the header's atomics from any thread.
#pragma once

#include <cstdint>

#include "memhandover/base/unique_fd.hpp"
#include "memhandover/ledger/host_copies.hpp"
#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

/// Whoever holds them can bring the host copies back to life.
struct host_copy_files {
  unique_fd bytes{};
  unique_fd table{};
  unique_fd disk{};  ///< none where all are in memory
};

/// Slots of one size, all free, no page present yet; those on `disk` are as many as that file, if there is one, has whole. Throws
/// as `host_copy_slots`, or why there can be none.
[[nodiscard]] host_copy_files create_host_copies(std::uint64_t budget, std::uint64_t slot_bytes,
                                                 unique_fd disk = {});

/// Descriptors of the same files.
[[nodiscard]] host_copy_files duplicate(host_copy_files const& files);

/// Whether both are the same memory. Throws `internal` if that cannot be told.
[[nodiscard]] bool same_memory(host_copy_files const& one, host_copy_files const& other);

class host_copy_table {
 public:
  /// Maps the table. Throws `internal` that names what is wrong with it or with the bytes: their sizes must fit each
  /// other, and never change.
  explicit host_copy_table(host_copy_files const& files);

  [[nodiscard]] host_copies_shape const& shape() const noexcept { return shape_; }
  /// As somebody may have written it since; for its atomics alone.
  [[nodiscard]] host_copies_header& header() const noexcept { return *header_; }
  [[nodiscard]] host_copies& copies() noexcept { return copies_; }
  [[nodiscard]] host_copies const& copies() const noexcept { return copies_; }
  [[nodiscard]] shared_segment const& segment() const noexcept { return segment_; }

 private:
  shared_segment segment_;
  host_copies_shape shape_;
  host_copies_header* header_;
  host_copies copies_;
};

}  // namespace sluice::memhandover
