/// Answers requests of the Open Inference Protocol V2, without knowing of sockets: what a request
/// asks is decided here, how bytes come and go in connection.hpp.
///
///   auto outcome = api.handle({.method = "GET", .target = "/v2/health/ready"});
///   // a reply, or a request for the service's infer(), whose result goes to api.answer()
///
/// Nothing here throws: every `error` becomes a reply {"error": …} with the status of
/// telemetry/error_table.hpp, and what is no `sluice::error`, or is `internal`, is logged and
/// answered without its text. Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/content_coding.hpp"
#include "runtime/server/http/oip_codec.hpp"
#include "runtime/server/http/routes.hpp"
#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

struct http_request {
  std::string_view method;
  std::string_view target;
  std::string_view body{};
  std::optional<std::string_view> content_encoding{};
  std::optional<std::string_view> binary_header_length{};  ///< Inference-Header-Content-Length
  std::shared_ptr<std::string>
      owner{};  ///< of the body, where tensors may keep it; else they are copies
  std::optional<std::string_view> accept_encoding{};
  std::uint64_t max_body_bytes = std::uint64_t{64} << 20U;  ///< that a compressed one may become
  growth_check on_growth{};                                 ///< of a compressed body
};

struct http_reply {
  unsigned status = 200;
  std::string body;                     ///< JSON, unless `content_type` is another
  std::string_view allow;               ///< for 405
  std::chrono::seconds retry_after{0};  ///< 0: not said
  std::string_view content_type = "application/json";
  std::vector<tensor_bytes> tensors{};  ///< behind the JSON
  /// Of a body with binary tensors, whether or not it is compressed: how long its JSON is.
  std::optional<std::size_t> binary_header_length{};
  content_coding coding = content_coding::identity;  ///< that the body has, tensors included
  bool varies = false;         ///< the coding is what the client has asked for
  bool lists_codings = false;  ///< for 415
  std::string_view cause{};    ///< the kind of the error that it tells, for logs
};

class oip_api {
 public:
  using outcome = std::variant<http_reply, decoded_request>;

  explicit oip_api(inference_service& service) : service_(service) {}

  /// The reply that the request gets whatever its body: lets a client that waits for "100 Continue"
  /// keep it.
  [[nodiscard]] std::optional<http_reply> refuse(http_request const& request) const;
  [[nodiscard]] outcome handle(http_request const& request) const;
  /// The same of a resource that is known, but for `infer`; of `request` its method and body count.
  [[nodiscard]] http_reply ask(route const& where, http_request const& request) const;
  /// Whether anybody may ask, for health alone.
  [[nodiscard]] static bool is_public(http_request const& request);
  /// Whether `handle` may take long: status and metrics may wait for another process, and a
  /// compressed body may become a large one.
  [[nodiscard]] static bool may_wait(http_request const& request);
  /// Whether it may wait for computations, or for files to be read.
  [[nodiscard]] static bool may_take_long(http_request const& request);
  /// `id` is what the request calls itself, for the log.
  [[nodiscard]] static http_reply answer(infer_result const& result, output_form const& form = {},
                                         std::string_view id = {});

  [[nodiscard]] static http_reply from_error(error const& failure, std::string_view id = {});
  /// For failures that have no error kind: those of HTTP itself.
  /// Of 503 and 429 with Retry-After: `retry_after`, rounded up, else a second.
  [[nodiscard]] static http_reply failure(
      unsigned status, std::string_view message,
      std::optional<std::chrono::milliseconds> retry_after = std::nullopt);

 private:
  [[nodiscard]] route checked_route(http_request const& request) const;
  [[nodiscard]] outcome checked_outcome(http_request const& request) const;
  [[nodiscard]] outcome dispatch(route const& where, http_request const& asked) const;
  [[nodiscard]] http_reply model_ready(route const& where) const;
  [[nodiscard]] http_reply repository_index(std::string_view body) const;

  inference_service& service_;
};

}  // namespace sluice::server
