#include "nccl_shim/calls/classified.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "nccl_shim/calls/domain.hpp"
#include "nccl_shim/calls/surroundings.hpp"

namespace sluice::nccl_shim {
namespace {

using communicators_of_group = std::vector<std::shared_ptr<known_communicator>>;

/// Of each call.
communicators_of_group communicators_of(std::span<collective const> calls) {
  communicators_of_group of;
  of.reserve(calls.size());
  for (std::size_t at = 0; at < calls.size(); ++at) {
    bool const is_same = at > 0 && calls[at].on == calls[at - 1].on;
    of.push_back(is_same ? of.back() : know(calls[at].on));
  }
  return of;
}

/// Of each part.
communicators_of_group communicators_of(graph_calls const& graph) {
  communicators_of_group of;
  of.reserve(graph.parts.size());
  std::ranges::transform(graph.parts, std::back_inserter(of), &exchange_part::of);
  return of;
}

/// The first one's trouble that has some.
int trouble_of(communicators_of_group const& of) {
  for (auto const& each : of) {
    if (int const trouble = each->trouble(); trouble != success) {
      return trouble;
    }
  }
  return success;
}

/// Whether all ranks can tell each other that they have come to its calls.
bool can_notify_each_other(std::shared_ptr<known_communicator> const& known) {
  return known->ranks != nullptr && known->ranks->all_have_places();
}

/// What is no part of a micro-batch; `parts` makes those of an exchange.
template <typename Parts>
kind_of_launch between_micro_batches(bool is_one, communicators_of_group const& of, Parts parts) {
  if (is_one) {
    return of.front()->ranks != nullptr ? kind_of_launch{numbered_group{of.front()}}
                                        : passing_group{of.front(), false};
  }
  return std::ranges::all_of(of, can_notify_each_other) ? kind_of_launch{exchange_group{parts()}}
                                                        : passing_group{of.front(), true};
}

kind_of_launch in_its_turn(std::span<collective const> calls, bool is_one,
                           communicators_of_group const& of) {
  if (std::uint64_t const micro_batch = gate()->micro_batch(); micro_batch != 0) {
    return inside_micro_batch(micro_batch, is_one, calls.front().on, of.front());
  }
  return between_micro_batches(is_one, of, [&] { return parts_of(calls, of); });
}

/// What is not made at once.
kind_of_group classify_further(std::span<collective const> calls, bool is_one) {
  auto const of = communicators_of(calls);
  if (int const trouble = trouble_of(of); trouble != success) {
    return refused_group{trouble};
  }
  if (gate()->attach_to_capture(calls.front().where, nullptr) != 0) {
    graph_calls held{calls.front(), is_one, numbered_graph(calls), parts_of(calls, of)};
    return captured_group{of.front(), std::make_unique<graph_calls>(std::move(held))};
  }
  return std::visit([](auto&& one) { return kind_of_group{std::forward<decltype(one)>(one)}; },
                    in_its_turn(calls, is_one, of));
}

}  // namespace

[[gnu::hot]] kind_of_group classify(std::span<collective const> calls) {
  bool const is_one = are_of_all(calls);
  {
    submission_under_way now;
    auto const& last = find_again(calls.front().on);
    if (is_one && last.agreement != nullptr && last.known->trouble() == success &&
        gate()->enter_at_once() != 0) {
      return at_once_group{std::move(now), last.known, last.agreement};
    }
  }
  return classify_further(calls, is_one);
}

kind_of_launch classify(graph_calls const& graph) {
  auto const of = communicators_of(graph);
  if (int const trouble = trouble_of(of); trouble != success) {
    return refused_group{trouble};
  }
  std::uint64_t const micro_batch = gate()->micro_batch();
  if (micro_batch == 0) {
    return between_micro_batches(graph.is_one, of, [&] { return graph.parts; });
  }
  if (!graph.is_one) {
    return refused_group{invalid_usage, "it is not of all ranks of one communicator alone"};
  }
  return inside_micro_batch(micro_batch, graph.is_one, graph.first.on, of.front());
}

}  // namespace sluice::nccl_shim
