/// What the fake NCCL and those who use it agree on.
///
/// It stands in for libnccl.so.2 where there is no GPU: ranks are processes, and a collective is a
/// kernel of the fake driver that ends only when all ranks have begun theirs, as NCCL's do. A unique
/// id is the path of a file in which the ranks meet. Calls are of `int`s; sums are of the first
/// element. A few sends to a rank end before it has received them, as NCCL's small ones do.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sluice::fake_nccl {

/// A call of so many elements fails with ncclUnhandledCudaError.
inline constexpr std::size_t failing_count = 666;
inline constexpr std::size_t most_collectives = 8192;
inline constexpr std::size_t most_communicators = 4;
inline constexpr std::size_t most_ranks = 4;
/// So many that are sent need nobody who receives them.
inline constexpr std::size_t buffered_sends = 4;

/// As NCCL's, of the same size.
struct unique_id {
  std::array<char, 128> path;
};

/// From one rank to another.
struct channel {
  std::atomic<std::size_t> sent;
  std::atomic<std::size_t> received;
  std::array<std::atomic<int>, buffered_sends> elements;
};
/// A communicator's calls in graphs, and how often each may run.
inline constexpr std::size_t most_captured = 4;
inline constexpr std::size_t most_runs = 8192;
inline constexpr std::size_t most_meetings = most_collectives + most_captured * most_runs;

/// The ranks of one communicator, zero at first.
struct ranks_meeting {
  std::atomic<std::uint32_t> entered;
  std::array<std::atomic<std::uint32_t>, most_meetings> begun;
  std::array<std::atomic<std::int64_t>, most_meetings> sum;
  std::array<std::array<channel, most_ranks>, most_ranks> channels;  // by sender and receiver
};

struct meeting_file {
  std::array<ranks_meeting, most_communicators> communicators;
};

}  // namespace sluice::fake_nccl
