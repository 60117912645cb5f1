/// How long it will take until what is parked is back, by what going and coming took before.
///
/// What lies on a disk takes longer than what lies in memory, and how much of it does is different each time. So a chunk's time
/// of being read is known apart from the rest; before one has ever been read, it is what writing one took.
///
///   return_estimate coming;
///   coming.went(3s, {1500ms, 2});
///   coming.expected(8, 2);  // 3 s: nothing is known yet but that
///   coming.came(2s, 8, {1200ms, 2});
///   coming.expected(4, 0);  // 400 ms
///
/// Thread-safety: none.
#pragma once

#include <chrono>
#include <cstdint>

namespace sluice::memhandover {

/// What reading or writing of chunks took, beside all else.
struct disk_time {
  std::chrono::nanoseconds time{0};
  std::uint32_t chunks = 0;
};

class return_estimate {
 public:
  /// Of the present absence, all that has gone so far: how long it took, and of that the disk.
  void went(std::chrono::nanoseconds in_all, disk_time written) noexcept;
  /// So many chunks are back.
  void came(std::chrono::nanoseconds in_all, std::uint32_t chunks, disk_time read) noexcept;
  /// For so many, of which some are on the disk.
  [[nodiscard]] std::chrono::nanoseconds expected(std::uint32_t chunks,
                                                  std::uint32_t on_disk) const noexcept;

 private:
  std::chrono::nanoseconds going_{0};
  std::chrono::nanoseconds a_chunk_{0};  ///< without the disk's; 0: none has ever come back
  std::chrono::nanoseconds reading_{0};  ///< one; 0: none has ever been read
  std::chrono::nanoseconds writing_{0};  ///< one, likewise
};

}  // namespace sluice::memhandover
