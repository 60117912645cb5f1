/// A call of NCCL that puts work on a stream, with its arguments by value, to be made later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "abi/nccl_abi.hpp"
#include "nccl_shim/agreement/cut.hpp"

namespace sluice::nccl_shim {

enum class operation : std::uint8_t {
  all_reduce = 1,
  broadcast,
  bcast,
  reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  send,
  receive,
  keep,  ///< no call of NCCL: the end of a micro-batch that all ranks keep
  graph  ///< none either: the launch of a CUDA graph that holds some
};

struct collective {
  operation what;
  void const* from;
  void* to;
  std::size_t count;
  int type;
  int reduction;  ///< 0 where there is none
  int root;       ///< or the peer; 0 where there is none
  communicator on;
  stream where;
};

/// NCCL's name of it.
[[nodiscard]] char const* name_of(operation what) noexcept;
/// Whether all ranks of the communicator take part, and not only two.
[[nodiscard]] constexpr bool is_of_all(operation what) noexcept {
  return what != operation::send && what != operation::receive;
}
/// Whether all ranks of one communicator take part in each of them, and of no other.
[[nodiscard]] bool are_of_all(std::span<collective const> calls) noexcept;
/// Calls NCCL. `invalid_usage` if this NCCL has no such function.
[[nodiscard]] int perform(collective const& call) noexcept;
/// The same for several: as one group.
[[nodiscard]] int perform(std::span<collective const> calls) noexcept;
/// What ranks must mean alike by the end of a micro-batch …
[[nodiscard]] numbered_call numbered_end() noexcept;
/// … by a call, or by several that are one group.
[[nodiscard]] numbered_call numbered(std::span<collective const> calls) noexcept;
/// … by the launch of a graph that holds those calls …
[[nodiscard]] numbered_call numbered_graph(std::span<collective const> calls) noexcept;
/// … or what two graphs hold, one after the other.
[[nodiscard]] numbered_call joined(numbered_call const& one, numbered_call const& other) noexcept;
/// "ncclAllReduce of 1024 elements of type 7".
[[nodiscard]] std::string to_text(numbered_call const& call);

}  // namespace sluice::nccl_shim
