/// What one can ask a running broker, and order it; nothing here starts one.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace sluice::memhandover {

/// Process id of the broker that listens in that folder, 0 if none does, or none that this process can see.
[[nodiscard]] int broker_pid(std::string const& runtime_dir);

/// What the broker says of its pools: what describe_pool tells of the first one, and where there are
/// several, `pools` with the same of each. With `device` only pools of that device count. Throws
/// `unavailable` if no broker listens in that folder, `not_found` if it keeps no such pool.
[[nodiscard]] nlohmann::json query_status(std::string const& runtime_dir,
                                          std::optional<int> device = std::nullopt);

/// The same with `runs` for each pool, which tell of every chunk as describe_chunks does. It is asked
/// in several messages: a pool that changes meanwhile is seen at several instants.
[[nodiscard]] nlohmann::json query_chunks(std::string const& runtime_dir,
                                          std::optional<int> device = std::nullopt);

/// What lay at an address of a client, of the one with that `pid` unless it is 0: what
/// describe_address tells of the first pool, with `pool` (`id`, `backend` and `device`), and where
/// there are several, `pools` with the same of each. Throws as `query_status` does.
[[nodiscard]] nlohmann::json query_address(std::string const& runtime_dir, std::uint64_t address,
                                           std::optional<int> device = std::nullopt,
                                           std::uint32_t pid = 0);

/// Has the broker do what `order` says, a message that docs/protocol.md names. Throws as `query_status` does, and what
/// the broker throws.
void give_order(std::string const& runtime_dir, nlohmann::json const& order);

}  // namespace sluice::memhandover
