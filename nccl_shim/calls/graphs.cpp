#include "nccl_shim/calls/graphs.hpp"

#include "nccl_shim/calls/surroundings.hpp"

namespace sluice::nccl_shim {

std::optional<int> capture(std::span<collective const> calls,
                           std::span<std::shared_ptr<known_communicator> const> of) {
  stream const where = calls.front().where;
  if (gate()->attach_to_capture(where, nullptr) == 0) {
    return std::nullopt;
  }
  int const result = hand_over_captured(calls, of.front());
  if (result == success || result == in_progress) {
    auto recorded = std::make_unique<graph_calls>(
        graph_calls{calls.front(), are_of_all(calls), numbered_graph(calls), parts_of(calls, of)});
    if (gate()->attach_to_capture(where, recorded.get()) != 0) {
      static_cast<void>(recorded.release());  // the graph's, until `release_graph`
    }
  }
  return result;
}

void* join_graphs(void* one, void* other) {
  auto both = std::make_unique<graph_calls>(*static_cast<graph_calls const*>(one));
  auto const& more = *static_cast<graph_calls const*>(other);
  both->is_one = both->is_one && more.is_one && both->parts.front().of == more.parts.front().of;
  add(both->parts, more.parts);
  both->alike = joined(both->alike, more.alike);
  return both.release();
}

void release_graph(void* held) {
  std::unique_ptr<graph_calls> const gone{static_cast<graph_calls*>(held)};
}

}  // namespace sluice::nccl_shim
