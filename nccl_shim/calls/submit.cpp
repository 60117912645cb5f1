#include "nccl_shim/calls/submit.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nccl_shim/calls/communicators.hpp"
#include "nccl_shim/calls/domain.hpp"
#include "nccl_shim/calls/graphs.hpp"
#include "nccl_shim/calls/pending_calls.hpp"
#include "nccl_shim/calls/surroundings.hpp"

namespace sluice::nccl_shim {
namespace {

/// The communicator of each call.
std::vector<std::shared_ptr<known_communicator>> of_each(std::span<collective const> calls) {
  std::vector<std::shared_ptr<known_communicator>> of;
  of.reserve(calls.size());
  for (std::size_t at = 0; at < calls.size(); ++at) {
    bool const is_same = at > 0 && calls[at].on == calls[at - 1].on;
    of.push_back(is_same ? of.back() : know(calls[at].on));
  }
  return of;
}

/// Whether its ranks can tell each other that they have come to its calls.
bool can_notify_each_other(std::shared_ptr<known_communicator> const& known) {
  return known->ranks != nullptr && known->ranks->all_have_places();
}

bool has_trouble(std::shared_ptr<known_communicator> const& known) {
  return known->trouble() != success;
}

/// The calling thread's micro-batch has the call; there may be none.
place_inside take_in(std::span<collective const> calls,
                     std::shared_ptr<known_communicator> const& known) {
  std::uint64_t const micro_batch = gate()->micro_batch();
  return micro_batch != 0 ? inside_micro_batch(micro_batch, calls, known) : place_inside{};
}

void complain_of_place(char const* called, char const* why) {
  std::fprintf(stderr, "sluice: %s inside of a micro-batch: %s\n", called, why);
}

/// Makes what cannot be made at once.
int submit_in_turn(std::span<collective const> calls) {
  auto const of = of_each(calls);
  auto const troubled = std::ranges::find_if(of, has_trouble);
  if (troubled != of.end()) {
    return (*troubled)->trouble();
  }
  if (auto const captured = capture(calls, of)) {
    return *captured;
  }
  auto place = take_in(calls, of.front());
  if (place.why_not != nullptr) {
    complain_of_place((std::string{name_of(calls.front().what)} + " was called").c_str(),
                      place.why_not);
    return invalid_usage;
  }
  bool const is_exchange = !are_of_all(calls) && std::ranges::all_of(of, can_notify_each_other);
  return is_exchange ? hand_over_exchange(calls, parts_of(calls, of))
                     : hand_over(calls, of.front(), std::move(place.of));
}

}  // namespace

/// A graph that is not one number is launched between micro-batches only: with those that exchange something with
/// it, or, if they cannot tell each other, without asking.
sluice_graph_result agree_on_launch(void* held, sluice_graph_launch const* launch,
                                    sluice_agreed_call* call) {
  auto const& graph = *static_cast<graph_calls const*>(held);
  if (std::ranges::any_of(graph.parts, has_trouble, &exchange_part::of)) {
    return SLUICE_GRAPH_REFUSED;
  }
  auto const& of = graph.parts.front().of;
  place_inside place;
  if (graph.is_one) {
    place = take_in({&graph.first, 1}, of);
  } else if (gate()->micro_batch() != 0) {
    place.why_not = "it is not of all ranks of one communicator alone";
  }
  if (place.why_not != nullptr) {
    complain_of_place((to_text(graph.alike) + " was launched").c_str(), place.why_not);
    return SLUICE_GRAPH_REFUSED;
  }
  if (graph.is_one && of->ranks == nullptr) {
    return SLUICE_GRAPH_PASSES;  // which has been told when the communicator was made
  }
  if (!graph.is_one &&
      !std::ranges::all_of(graph.parts, can_notify_each_other, &exchange_part::of)) {
    static std::atomic<bool> warned{false};
    if (!warned.exchange(true)) {
      std::fputs(
          "sluice: a CUDA graph has collectives of several communicators, or sends and receives, "
          "and not all of its ranks are processes of this host under `sluice run`: they do not "
          "agree on its launches, and a pause may wait for other ranks\n",
          stderr);
    }
    return SLUICE_GRAPH_PASSES;
  }
  *call = graph.is_one ? as_agreed(graph.alike, of, std::move(place.of), *launch)
                       : as_exchange(graph.alike, graph.parts, *launch);
  return SLUICE_GRAPH_AGREED;
}

[[gnu::hot]] int submit(std::span<collective const> calls) {
  {
    submission_under_way const now;
    auto const& last = find_again(calls.front().on);
    if (last.agreement != nullptr && last.known->trouble() == success && are_of_all(calls)) {
      if (auto const made = make_at_once(calls, *last.known, *last.agreement)) {
        return *made;
      }
    }
  }
  return submit_in_turn(calls);
}

}  // namespace sluice::nccl_shim
