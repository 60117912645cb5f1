/// What one can ask a running broker; nothing here starts one or changes anything.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace sluice::memhandover {

/// Process id of the broker that listens in that folder, 0 if none does.
[[nodiscard]] int broker_pid(std::string const& runtime_dir);

/// What the broker says of its pool, as describe_pool. Throws `unavailable` if none listens in that
/// folder.
[[nodiscard]] nlohmann::json query_status(std::string const& runtime_dir);

/// The same with `runs`, which tell of every chunk as describe_chunks does. It is asked in several
/// messages: a pool that changes meanwhile is seen at several instants.
[[nodiscard]] nlohmann::json query_chunks(std::string const& runtime_dir);

}  // namespace sluice::memhandover
