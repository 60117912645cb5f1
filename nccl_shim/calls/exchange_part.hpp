/// Who takes part in an exchange: in sends, receives, and collectives that are not all of one communicator.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "nccl_shim/agreement/exchanges.hpp"
#include "nccl_shim/calls/collective.hpp"
#include "nccl_shim/calls/known_communicator.hpp"

namespace sluice::nccl_shim {

/// What one communicator has of it. A collective is like a send to, and a receive from, all other ranks.
struct exchange_part {
  std::shared_ptr<known_communicator> of;
  std::vector<transfers> with;  ///< none where its ranks do not agree
};

/// Of each communicator once; `of` are those of the calls, one by one.
[[nodiscard]] std::vector<exchange_part> parts_of(
    std::span<collective const> calls, std::span<std::shared_ptr<known_communicator> const> of);
/// Adds to what there is of each communicator.
void add(std::vector<exchange_part>& all, std::span<exchange_part const> more);

}  // namespace sluice::nccl_shim
