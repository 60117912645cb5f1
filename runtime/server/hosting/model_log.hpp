/// Log lines of the files that include torch. torch brings a copy of fmt that spdlog must not meet
/// in one file.
#pragma once

#include <cstdint>
#include <string>

namespace sluice::server {

/// A model has been read. `outside`: bytes of its weights that will not lie in the pool; `pinned`:
/// whether its image can be copied at full speed.
void log_prepared(std::string const& model, std::uint64_t bytes, std::uint64_t outside,
                  bool pinned);

}  // namespace sluice::server
