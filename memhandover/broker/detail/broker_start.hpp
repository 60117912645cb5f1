/// Starting `sluice broker` in a session of its own, and hearing whether it has come up.
#pragma once

#include <string>

#include "memhandover/broker/broker_launch.hpp"

namespace sluice::memhandover::detail {

/// Returns when the broker listens. Throws what it says of itself, or what is known of its end: its
/// folder's broker.log has the rest.
void start_broker(broker_options const& options, std::string const& runtime_dir);

}  // namespace sluice::memhandover::detail
