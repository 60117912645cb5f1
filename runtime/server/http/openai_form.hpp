/// What OpenAI's clients send and expect beside an engine's own answers: which path is which, a list of models, and errors. Pure.
///
///   openai_resource_of("/v1/models/org%2Fname");   // of one model, "org/name"
///   openai_failure(400, "…", {.param = "model"});  // {"error": {"message": "…", "type": …}}
///
/// Source: OpenAI's API reference ("Models", "Error codes", "Streaming events" of responses: "error"), and what its Python client reads of an error.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/http/api.hpp"

namespace sluice::server {

/// What a path below /v1 is.
struct openai_resource {
  enum class kind { models, one_model, of_a_model };
  kind is = kind::of_a_model;  ///< that the body names
  std::string model;           ///< with `one_model`
};

/// Throws `invalid_argument` for a path that is not percent-encoded properly.
[[nodiscard]] openai_resource openai_resource_of(std::string_view target);

struct openai_error {
  std::string_view code{};   ///< such as "model_not_found"; empty: null
  std::string_view param{};  ///< the key of the body that it is about; empty: null
};

/// With Retry-After as `oip_api::failure` has it.
[[nodiscard]] http_reply openai_failure(unsigned status, std::string_view message,
                                        openai_error const& about = {});
/// The same refusal in OpenAI's form, if it is one in that of the Open Inference Protocol.
[[nodiscard]] http_reply in_openai_form(http_reply reply);
/// The last server-sent event of an answer that breaks off, to a request of that target: `{"error": {…}}`, as clients of completions
/// expect it, or below /v1/responses the event `error`, whose sequence number is not known here.
[[nodiscard]] std::string openai_error_event(std::string_view target, std::string_view message);
/// 404 that names some of those that exist.
[[nodiscard]] http_reply unknown_model(std::string_view name,
                                       std::vector<std::string> const& known);

/// GET /v1/models, of objects such as {"id": …, "object": "model"}.
[[nodiscard]] http_reply model_list_reply(nlohmann::json const& models);
/// GET /v1/models/NAME; nothing: it is not among them.
[[nodiscard]] std::optional<http_reply> one_model_reply(nlohmann::json const& models,
                                                        std::string_view name);

}  // namespace sluice::server
