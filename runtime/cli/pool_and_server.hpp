/// Everything that is known of the pools of a broker, each with its inference server, in one JSON object: what `sluice
/// status --json` prints.
///
/// The broker's part (`pool`, `clients`, `handovers`) comes over its socket, the server's
/// (`models`, `requests`, …) over the one that it has for that in the runtime folder, else from GET
/// http://ENDPOINT/v2/sluice/status. `server` says whether there
/// is one and whether it answered.
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace sluice::cli {

/// Where the broker keeps several pools, `pools` has such an object for each, and the others are the
/// first one's; with `device` only pools of that device count.
///
/// Throws `unavailable` if no broker runs there, `not_found` if it keeps no such pool. A server that does not answer is told in
/// `server.error`.
[[nodiscard]] nlohmann::json pool_and_server(std::string const& runtime_dir,
                                             std::optional<int> device = std::nullopt);

/// Has the server of that pool do something (server/status_socket.hpp), and waits until it has. Throws as `pool_and_server`, and
/// why it could not be done.
[[nodiscard]] nlohmann::json ask_server(std::string const& runtime_dir, std::optional<int> device,
                                        std::string const& wanted);

/// The pool's JSON with the server's added. The server's own `server` and `handovers` (one entry
/// for each load of a model) go into `server`; of the rest, what both name stays as the pool has
/// it.
[[nodiscard]] nlohmann::json merged(nlohmann::json pool, nlohmann::json server);

/// HTTP GET of a JSON document from `endpoint`, as "host:port". Throws `unavailable` with what went
/// wrong, or `deadline_exceeded`.
[[nodiscard]] nlohmann::json get_json(std::string const& endpoint, std::string const& target,
                                      std::chrono::milliseconds patience);

}  // namespace sluice::cli
