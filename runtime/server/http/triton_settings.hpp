/// What Triton's logging and trace extensions set, as far as it means something here: what they
/// answer is true, and what cannot be set is refused.
///
///   log_settings();                                            // {"log_info": true, …}
///   update_log_settings(json::parse(R"({"log_info": false})"));  // warnings and errors are left
///   update_trace_settings(json::parse(R"({"trace_level": ["OFF"]})"));
///
/// The log is that of the calling process. Updates return what holds then, and throw
/// `invalid_argument` for what no setting can be, `unsupported` for what this server does not do;
/// nothing has changed then. Thread-safe.
///
/// Source: Triton, docs/protocol/extension_logging.md and extension_trace.md.
#pragma once

#include <nlohmann/json.hpp>

namespace sluice::server {

[[nodiscard]] nlohmann::json log_settings();
nlohmann::json update_log_settings(nlohmann::json const& wanted);

[[nodiscard]] nlohmann::json trace_settings();
nlohmann::json update_trace_settings(nlohmann::json const& wanted);

}  // namespace sluice::server
