/// Whether a folder will do for host copies that memory has no room for, and how much its disk has.
///
/// That a file system keeps its files in memory is seen of the usual ones; not of one that lies on top of such a one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace sluice::memhandover {

/// How much of which disk is wanted.
struct disk_wish {
  std::string folder;
  std::uint64_t bytes = 0;  ///< 0: nothing
};

/// What a file system has, in bytes, for this user.
struct disk_room {
  std::uint64_t most = 0;
  std::uint64_t available = 0;
};

/// What is left to others on the disk.
inline constexpr std::uint64_t disk_headroom = 256ULL << 20U;

/// Why host copies cannot lie in that folder, whatever room it has: it is none, may not be written to, or is memory. Nothing if
/// they can.
[[nodiscard]] std::optional<std::string> refusal_of_folder(std::string const& folder);
/// Throws `unavailable`.
[[nodiscard]] disk_room read_disk_room(std::string const& folder);
/// Why the file system can never have so much, with the numbers. Nothing if it can.
[[nodiscard]] std::optional<std::string> refusal_of_disk(disk_wish const& wanted,
                                                         disk_room const& room);
/// Why it cannot have it at present. Likewise.
[[nodiscard]] std::optional<std::string> shortage_of_disk(disk_wish const& wanted,
                                                          disk_room const& room);

}  // namespace sluice::memhandover
