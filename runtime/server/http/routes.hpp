/// Which resource of the protocol a request target names. Pure.
///
///   auto found = parse_target("/v2/models/a%2Fb/versions/3/infer");
///   found->what;      // resource::infer
///   found->model;     // "a/b"
///   found->version;   // "3"
///
/// Percent-encoding is undone segment by segment, after splitting, so that an encoded slash stays
/// part of a name. A query is passed over; one slash at the end is allowed; an absolute-form target
/// ("http://host/v2") is understood.
///
/// Source: Open Inference Protocol V2 (HTTP/REST); Triton's model_configuration, model_repository,
/// statistics, logging and trace extensions; RFC 9112 section 3.2, RFC 3986 section 2.1.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::server {

enum class resource {
  server_metadata,
  live,
  ready,
  model_metadata,
  model_ready,
  model_config,
  infer,
  repository_index,
  repository_load,
  repository_unload,
  status,
  metrics,
  statistics,     ///< of all models where none is named
  trace_setting,  ///< of a model, or of all
  logging,
  extension,  ///< of Triton's, known but not offered: shared memory, generate
};

struct route {
  resource what = resource::server_metadata;
  std::string model;
  std::string version;  ///< empty: not given
};

/// None for a path that does not exist. Throws `invalid_argument` for a malformed target:
/// percent-encoding, or a name that decodes to something other than UTF-8 text.
[[nodiscard]] std::optional<route> parse_target(std::string_view target);

/// The segments of a target's path, decoded. Throws as `parse_target`.
[[nodiscard]] std::vector<std::string> path_segments(std::string_view target);

/// The verbs that a resource answers, as the Allow header lists them: "GET, HEAD", "POST" or "GET,
/// HEAD, POST"; empty for `extension`.
[[nodiscard]] std::string_view allowed_methods(resource what) noexcept;

}  // namespace sluice::server
