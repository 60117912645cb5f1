#include "nccl_shim/calls/graphs.hpp"

#include <memory>

namespace sluice::nccl_shim {

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
