#include "memhandover/ledger/demand_order.hpp"

#include <algorithm>
#include <tuple>
#include <vector>

namespace sluice::memhandover {
namespace {

/// Of who is asked one after the other; the least first.
auto rank_of(giver const& of) noexcept {
  return std::tuple{of.turn, of.rank, of.in_use, of.is_copied};
}

bool has_less_at_once(giver const& one, giver const& other) noexcept {
  return one.has.at_once < other.has.at_once;
}

bool has_less(giver const& one, giver const& other) noexcept {
  return one.has.all() < other.has.all();
}

/// Those of the first rank that can give anything, in their order.
std::vector<giver> first_rank(std::span<giver const> givers) {
  std::vector<giver> first;
  for (auto const& each : givers) {
    if (each.has.all() == 0) {
      continue;
    }
    if (!first.empty() && rank_of(each) < rank_of(first.front())) {
      first.clear();
    }
    if (first.empty() || rank_of(each) == rank_of(first.front())) {
      first.push_back(each);
    }
  }
  return first;
}

}  // namespace

giveable giveable_of(holdings_of_tenant const& tenant) noexcept {
  auto const above = tenant.held - std::min(tenant.held, tenant.least);
  auto const kept = std::min(tenant.kept, tenant.held);
  auto const at_once = std::min(above, tenant.held - kept);
  return {at_once, std::min({above - at_once, kept, tenant.parkable})};
}

std::optional<next_asked> next_demand(std::span<giver const> givers, std::uint32_t missing) {
  auto rank = first_rank(givers);
  if (rank.empty() || missing == 0) {
    return std::nullopt;
  }
  if (rank.size() == 1) {
    auto const& alone = rank.front();
    return next_asked{alone.slot, std::min(missing, alone.most), true};
  }
  std::uint64_t at_once = 0;
  for (auto const& each : rank) {
    at_once += each.has.at_once;
  }
  if (at_once < missing) {
    // Somebody is parked: who could give most, and it alone if that will do. The others give before it what they have at once.
    auto const parked = std::max_element(rank.begin(), rank.end(), has_less);
    auto const of = *parked;
    rank.erase(parked);
    auto const before = std::max_element(rank.begin(), rank.end(), has_less_at_once);
    if (before->has.at_once == 0) {
      return next_asked{of.slot, std::min(missing, of.has.all()), true};
    }
    return next_asked{before->slot, std::min(missing, before->has.at_once), false};
  }
  auto const& most = *std::max_element(rank.begin(), rank.end(), has_less_at_once);
  return next_asked{most.slot, std::min(missing, most.has.at_once), false};
}

}  // namespace sluice::memhandover
