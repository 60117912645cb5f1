#include "nccl_shim/calls/exchange_part.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace sluice::nccl_shim {
namespace {

std::vector<transfers> transfers_of(collective const& call, known_communicator const& on) {
  if (on.ranks == nullptr) {
    return {};
  }
  if (!is_of_all(call.what)) {
    std::uint32_t const sends = call.what == operation::send ? 1 : 0;
    return {{static_cast<unsigned>(call.root), sends, 1 - sends}};
  }
  std::vector<transfers> all;
  for (unsigned const peer : on.ranks->transfers().others()) {
    all.push_back({peer, 1, 1});
  }
  return all;
}

}  // namespace

std::vector<exchange_part> parts_of(std::span<collective const> calls,
                                    std::span<std::shared_ptr<known_communicator> const> of) {
  std::vector<exchange_part> parts;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    exchange_part const one{of[i], transfers_of(calls[i], *of[i])};
    add(parts, {&one, 1});
  }
  return parts;
}

void add(std::vector<exchange_part>& all, std::span<exchange_part const> more) {
  for (exchange_part const& each : more) {
    auto found = std::ranges::find(all, each.of, &exchange_part::of);
    if (found == all.end()) {
      found = all.insert(found, exchange_part{each.of, {}});
    }
    for (transfers const& with : each.with) {
      add(found->with, with);
    }
  }
}

}  // namespace sluice::nccl_shim
