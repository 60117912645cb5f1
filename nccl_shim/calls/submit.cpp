#include "nccl_shim/calls/submit.hpp"

#include <atomic>
#include <cstdio>
#include <string>
#include <utility>
#include <variant>

#include "nccl_shim/calls/classified.hpp"
#include "nccl_shim/calls/pending_calls.hpp"

namespace sluice::nccl_shim {
namespace {

/// `what` was called, or launched.
void complain_of(std::string const& what, refused_group const& one) {
  if (one.why_not_inside != nullptr) {
    std::fprintf(stderr, "sluice: %s inside of a micro-batch: %s\n", what.c_str(),
                 one.why_not_inside);
  }
}

int make(std::span<collective const> calls, refused_group const& one) {
  complain_of(std::string{name_of(calls.front().what)} + " was called", one);
  return one.result;
}

/// Of a launch: what the gate makes of it.
struct launch_of_graph {
  graph_calls const& graph;
  sluice_graph_launch const& launch;
  sluice_agreed_call& call;

  sluice_graph_result operator()(refused_group const& one) const {
    complain_of(to_text(graph.alike) + " was launched", one);
    return SLUICE_GRAPH_REFUSED;
  }

  sluice_graph_result operator()(passing_group const& one) const {
    static std::atomic<bool> warned{false};
    // That the communicator's ranks do not agree has been told when it was made.
    if (one.is_exchange && !warned.exchange(true)) {
      std::fputs(
          "sluice: a CUDA graph has collectives of several communicators, or sends and receives, "
          "and not all of its ranks are processes of this host under `sluice run`: they do not "
          "agree on its launches, and a pause may wait for other ranks\n",
          stderr);
    }
    return SLUICE_GRAPH_PASSES;
  }

  sluice_graph_result operator()(numbered_group one) const {
    call = as_agreed(graph.alike, std::move(one), launch);
    return SLUICE_GRAPH_AGREED;
  }

  sluice_graph_result operator()(exchange_group one) const {
    call = as_agreed(graph.alike, std::move(one), launch);
    return SLUICE_GRAPH_AGREED;
  }
};

}  // namespace

[[gnu::hot]] int submit(std::span<collective const> calls) {
  return std::visit([calls](auto&& one) { return make(calls, std::forward<decltype(one)>(one)); },
                    classify(calls));
}

sluice_graph_result agree_on_launch(void* held, sluice_graph_launch const* launch,
                                    sluice_agreed_call* call) {
  auto const& graph = *static_cast<graph_calls const*>(held);
  return std::visit(launch_of_graph{graph, *launch, *call}, classify(graph));
}

}  // namespace sluice::nccl_shim
