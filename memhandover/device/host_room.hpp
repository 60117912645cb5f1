/// How much of the host's memory a pool can have: what the machine has, and what memory cgroups allow.
///
/// A page of a pool counts to the cgroup of whoever touches it first, so that the broker, which reads
/// its own, sees the limit of the others only where they share it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace sluice::memhandover {

struct host_room {
  std::uint64_t most = 0;        ///< bytes that there can ever be
  std::string most_set_by;       ///< what says so, such as "the limit of the memory cgroup /a"
  std::uint64_t available = 0;   ///< bytes that there are now, caches given up
  std::string available_set_by;  ///< likewise
};

/// Reads /proc/meminfo and the memory limits of this process's cgroup and all cgroups above it, of
/// version 2 and 1, below `root`. What cannot be read does not limit.
[[nodiscard]] host_room read_host_room(std::filesystem::path const& root = "/");

/// How many of a memfd's `bytes` nobody has used yet; 0 if that cannot be told.
[[nodiscard]] std::uint64_t untouched_bytes(int memfd, std::uint64_t bytes) noexcept;

/// What to say if `untouched` bytes of pools, all of which may be used one day, are more than there
/// is now.
[[nodiscard]] std::optional<std::string> shortage(std::uint64_t untouched, host_room const& room);

/// What is left to others where host copies are made present.
inline constexpr std::uint64_t host_copies_headroom = 256ULL << 20U;

/// Why the host can never have `budget` bytes of host copies, in slots of `slot_bytes`, beside `pool_bytes` of it for pools:
/// with these numbers, and what could be had. Nothing if it can.
[[nodiscard]] std::optional<std::string> refusal_of_host_copies(std::uint64_t budget,
                                                                std::uint64_t slot_bytes,
                                                                std::uint64_t pool_bytes,
                                                                host_room const& room);
/// What to say if it can, but there is less at present: then some of them wait until others give memory back.
[[nodiscard]] std::optional<std::string> shortage_of_host_copies(std::uint64_t budget,
                                                                 host_room const& room);

}  // namespace sluice::memhandover
