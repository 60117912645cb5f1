/// How a model's configuration wants it computed.
#pragma once

#include <cstddef>

namespace sluice::server {

struct computing_rules {
  /// Computations at once, which share the weights: all counts of `instance_group` together.
  std::size_t instances = 1;
  /// On a GPU what it launches is recorded as CUDA graphs: `optimization { cuda { graphs: true } }`.
  bool records_launches = false;

  friend bool operator==(computing_rules const&, computing_rules const&) = default;
};

}  // namespace sluice::server
