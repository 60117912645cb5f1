#include "runtime/server/http/api.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <limits>
#include <mutex>
#include <span>
#include <system_error>
#include <utility>

#include "runtime/server/http/oip_codec.hpp"
#include "runtime/server/http/triton_settings.hpp"
#include "runtime/server/inference/model_executor.hpp"
#include "runtime/telemetry/error_table.hpp"
#include "runtime/telemetry/logging.hpp"
#include "runtime/telemetry/metrics_text.hpp"
#include "runtime/telemetry/recurring_lines.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;

constexpr std::size_t max_small_body =
    4096;  // before it becomes a document tree of many times its size

/// A refusal whose status no error kind stands for.
struct http_failure {
  http_reply answer;
};

http_reply ok(json const& body) {
  return {200, body.dump(-1, ' ', false, json::error_handler_t::replace), {}};
}

bool reads(http_request const& request) {
  return request.method == "GET" || request.method == "HEAD";
}

std::optional<resource> resource_of(http_request const& request) {
  try {
    auto const where = parse_target(request.target);
    return where ? std::optional{where->what} : std::nullopt;
  } catch (error const&) {  // `handle` says what is wrong with it
    return std::nullopt;
  }
}

void check_method(route const& where, http_request const& request) {
  if (where.what == resource::extension) {
    throw error{error_kind::unsupported,
                "this server does not offer that extension of Triton's; 'extensions' of GET /v2 "
                "lists those that it does"};
  }
  auto const allowed = allowed_methods(where.what);
  if (reads(request) && allowed.starts_with("GET")) return;
  if (request.method == "POST" && allowed.ends_with("POST")) return;
  auto answer = oip_api::failure(405, fmt::format("{} does not answer {}; it takes {}",
                                                  request.target, request.method, allowed));
  answer.allow = allowed;
  throw http_failure{std::move(answer)};
}

content_coding coding_of_body(http_request const& request) {
  auto const coding = coding_of(request.content_encoding.value_or(""));
  if (coding) return *coding;
  auto answer = oip_api::failure(
      415, fmt::format("content encoding '{}' is not known here; a body is sent as it is, or once "
                       "compressed with one of {}",
                       *request.content_encoding, known_codings));
  answer.lists_codings = true;
  throw http_failure{std::move(answer)};
}

/// The same request with its body as it was before it was compressed.
http_request plain(http_request request) {
  auto const coding = coding_of_body(request);
  if (coding == content_coding::identity || request.body.empty()) return request;
  auto body = decompressed(request.body, coding, request.max_body_bytes, request.on_growth);
  if (!body) {
    throw http_failure{oip_api::failure(
        413, fmt::format("decompressed the body is larger than the {} bytes that this server takes",
                         request.max_body_bytes))};
  }
  request.owner = std::make_shared<std::string>(std::move(*body));
  request.body = *request.owner;
  return request;
}

void compress(http_reply& reply, content_coding coding) {
  auto bytes = reply.body.size();
  for (auto const& each : reply.tensors) bytes += each.size();
  reply.varies = bytes >= least_compressed;
  if (!reply.varies || coding == content_coding::identity) return;
  reply.body = compressed(reply.body, reply.tensors, coding);
  reply.tensors.clear();
  reply.coding = coding;
}

/// How many bytes of an infer request's body are JSON, as its client says.
std::optional<std::uint64_t> json_length(http_request const& request) {
  if (!request.binary_header_length) return std::nullopt;
  auto const& text = *request.binary_header_length;
  std::uint64_t length = 0;
  auto const [end, status] = std::from_chars(text.data(), text.data() + text.size(), length);
  if (status == std::errc::result_out_of_range) {
    length = std::numeric_limits<std::uint64_t>::max();
  } else if (status != std::errc{} || end != text.data() + text.size()) {
    throw error{error_kind::invalid_argument,
                fmt::format("Inference-Header-Content-Length is '{}'; it takes the number of bytes "
                            "that the body's JSON has",
                            text)};
  }
  if (length == 0) {
    throw error{error_kind::unsupported,
                "Inference-Header-Content-Length is 0: requests without JSON are not supported; "
                "describe the tensors in JSON and send it before them"};
  }
  return length;
}

infer_body split(http_request const& request) {
  auto const length = json_length(request);
  if (!length) return {request.body};
  auto const all = request.body.size();
  if (*length > all) {
    throw error{error_kind::invalid_argument,
                fmt::format("Inference-Header-Content-Length is {}, but the body has {} bytes; it "
                            "takes the number of bytes that the body's JSON has",
                            *request.binary_header_length, all)};
  }
  auto const json_bytes = static_cast<std::size_t>(*length);
  auto const owner = request.owner ? request.owner : std::make_shared<std::string>(request.body);
  return {std::string_view{*owner}.substr(0, json_bytes),
          std::as_writable_bytes(std::span{*owner}.subspan(json_bytes)), true, owner};
}

/// Discarded if it is not JSON, or too long to be meant.
json small_document(std::string_view body) {
  if (body.size() > max_small_body) return json(json::value_t::discarded);
  return json::parse(body, nullptr, false);
}

/// Of a request to load or to unload: {"parameters": {…}}, or nothing.
json parameters_of(std::string_view body) {
  if (body.empty()) return json::object();
  auto const request = json::parse(body, nullptr, false);
  auto const takes = [&](json const& part) {
    if (part.is_object()) return;
    throw error{error_kind::invalid_argument, R"(the body is empty or {"parameters": an object})"};
  };
  takes(request);
  auto parameters = request.value("parameters", json::object());
  takes(parameters);
  return parameters;
}

constexpr std::size_t longest_logged_id = 128;

/// However often it comes again.
void log_bug(std::string_view text, std::string_view id) {
  static std::mutex mutex;
  static telemetry::recurring_lines lines;
  std::unique_lock lock{mutex};
  auto const due = lines.on(text, telemetry::recurring_lines::clock::now());
  lock.unlock();
  if (due) {
    spdlog::error("request failed by a bug in the server reason={} repeated={} others={} id={}",
                  telemetry::quoted(text), due->repeated, due->others,
                  telemetry::quoted(id.substr(0, longest_logged_id)));
  }
}

/// `about` with "ready" in it, and why not.
http_reply readiness_reply(readiness const& now, json about) {
  about["ready"] = now.ready;
  if (now) return ok(about);
  about["error"] = now.reason;
  auto answer = oip_api::failure(503, "", now.retry_after);
  answer.body = ok(about).body;
  return answer;
}

/// Runs `work` and turns whatever it throws into a reply.
template <typename Result, typename Work>
Result guarded(Work work, std::string_view id = {}) noexcept {
  try {
    return work();
  } catch (http_failure const& refusal) {
    return refusal.answer;
  } catch (error const& failure) {
    return oip_api::from_error(failure, id);
  } catch (std::exception const& failure) {
    return oip_api::from_error({error_kind::internal, failure.what()}, id);
  } catch (...) {
    return oip_api::from_error({error_kind::internal, "an exception of unknown type"}, id);
  }
}

}  // namespace

bool oip_api::is_public(http_request const& request) {
  auto const what = resource_of(request);
  return (what == resource::live || what == resource::ready) && reads(request);
}

bool oip_api::may_wait(http_request const& request) {
  bool const is_compressed = request.content_encoding && !request.body.empty();
  auto const what = resource_of(request);
  return what && (is_compressed || what == resource::status || what == resource::metrics);
}

bool oip_api::may_take_long(http_request const& request) {
  auto const what = resource_of(request);
  return what == resource::repository_load || what == resource::repository_unload;
}

http_reply oip_api::failure(unsigned status, std::string_view message,
                            std::optional<std::chrono::milliseconds> retry_after) {
  constexpr std::chrono::seconds soonest{1};
  http_reply answer{status, encode_error(message), {}};
  if (status == 503 || status == 429) {
    answer.retry_after =
        std::max(soonest, std::chrono::ceil<std::chrono::seconds>(retry_after.value_or(soonest)));
  }
  return answer;
}

http_reply oip_api::from_error(error const& failure, std::string_view id) {
  auto const status = static_cast<unsigned>(telemetry::http_status(failure.kind()));
  bool const is_bug = failure.kind() == error_kind::internal;
  if (is_bug) log_bug(failure.what(), id);
  auto reply = oip_api::failure(
      status, is_bug ? "internal error; the server's log has the details" : failure.what(),
      failure.retry_after());
  reply.cause = to_string(failure.kind());
  return reply;
}

route oip_api::checked_route(http_request const& request) const {
  auto const where = parse_target(request.target);
  if (!where) {
    throw error{error_kind::not_found,
                fmt::format("there is nothing at {}; the protocol's root is /v2", request.target)};
  }
  check_method(*where, request);
  static_cast<void>(coding_of_body(request));
  if (where->what == resource::infer) static_cast<void>(json_length(request));
  return *where;
}

std::optional<http_reply> oip_api::refuse(http_request const& request) const {
  return guarded<std::optional<http_reply>>([&]() -> std::optional<http_reply> {
    auto const where = checked_route(request);
    if (where.what == resource::infer) {
      static_cast<void>(service_.metadata(where.model, where.version));  // throws not_found
    }
    return std::nullopt;
  });
}

oip_api::outcome oip_api::handle(http_request const& request) const {
  return guarded<outcome>([&] { return checked_outcome(request); });
}

http_reply oip_api::ask(route const& where, http_request const& request) const {
  return guarded<http_reply>([&] { return std::get<http_reply>(dispatch(where, request)); });
}

oip_api::outcome oip_api::checked_outcome(http_request const& request) const {
  auto const where = checked_route(request);
  auto result = dispatch(where, plain(request));
  auto const coding = accepted_coding(request.accept_encoding.value_or(""));
  if (auto* const decoded = std::get_if<decoded_request>(&result)) {
    decoded->form.coding = coding;
  } else if (auto& reply = std::get<http_reply>(result); reply.status == 200) {
    compress(reply, coding);
  }
  return result;
}

oip_api::outcome oip_api::dispatch(route const& where, http_request const& asked) const {
  switch (where.what) {
    case resource::server_metadata:
      return ok(
          json{{"name", "sluice"},
               {"version", SLUICE_VERSION},
               {"extensions", json::array({"model_configuration", "statistics",
                                           "binary_tensor_data", "logging", "model_repository"})}});
    case resource::live:
      return ok(json{{"live", true}});
    case resource::ready:
      return readiness_reply(service_.ready(), json::object());
    case resource::model_metadata:
      return ok(encode_model_metadata(service_.metadata(where.model, where.version)));
    case resource::model_ready:
      return model_ready(where);
    case resource::model_config:
      return ok(service_.config(where.model, where.version));
    case resource::infer: {
      auto request =
          decode_infer_request(split(asked), service_.metadata(where.model, where.version));
      request.version = where.version;
      return request;
    }
    case resource::repository_index:
      return repository_index(asked.body);
    case resource::repository_load:
      service_.load(where.model, parameters_of(asked.body));
      return ok(json::object());
    case resource::repository_unload:
      (void)parameters_of(asked.body);
      service_.unload(where.model);
      return ok(json::object());
    case resource::status:
      return ok(service_.status());
    case resource::metrics: {
      http_reply answer{200, service_.metrics(), {}};
      answer.content_type = telemetry::metrics_content_type;
      return answer;
    }
    case resource::statistics:
      return ok(service_.statistics(where.model, where.version));
    case resource::logging:
      return ok(asked.method == "POST" ? update_log_settings(small_document(asked.body))
                                       : log_settings());
    case resource::trace_setting:
      if (!where.model.empty()) static_cast<void>(service_.metadata(where.model, where.version));
      return ok(asked.method == "POST" ? update_trace_settings(small_document(asked.body))
                                       : trace_settings());
    case resource::extension:
      break;  // refused with its method
  }
  throw error{error_kind::internal, "a resource without an answer"};
}

http_reply oip_api::model_ready(route const& where) const {
  auto now = service_.model_ready(where.model, where.version);
  bool const is_cold = now.reason == to_string(model_state::cold);
  now.reason = fmt::format("model '{}' is not ready: {}{}", where.model, now.reason,
                           is_cold ? "; an infer request loads it" : "");
  return readiness_reply(now, json{{"name", where.model}});
}

http_reply oip_api::repository_index(std::string_view body) const {
  bool ready_only = false;
  if (body.find_first_not_of(" \t\r\n") != std::string_view::npos) {
    auto const request = small_document(body);
    auto const* const takes = R"(the body is empty or {"ready": true or false})";
    if (!request.is_object()) throw error{error_kind::invalid_argument, takes};
    auto const wanted = request.find("ready");
    if (wanted != request.end()) {
      if (!wanted->is_boolean()) throw error{error_kind::invalid_argument, takes};
      ready_only = wanted->get<bool>();
    }
  }
  json index = json::array();
  for (auto const& model : service_.models()) {
    for (auto const& version : service_.versions(model)) {
      auto const now = service_.model_ready(model, version);
      if (ready_only && !now) continue;
      index.push_back({{"name", model},
                       {"version", version},
                       {"state", now ? "READY" : "UNAVAILABLE"},
                       {"reason", now.reason}});
    }
  }
  for (auto const& each : service_.unservable()) {
    if (ready_only) break;
    index.push_back(
        {{"name", each.name}, {"state", "UNAVAILABLE"}, {"reason", each.reason.what()}});
  }
  return ok(index);
}

http_reply oip_api::answer(infer_result const& result, output_form const& form,
                           std::string_view id) {
  return guarded<http_reply>(
      [&]() -> http_reply {
        if (auto const* const failure = std::get_if<error>(&result)) throw *failure;
        auto made = encode_infer_response(std::get<infer_response>(result), form);
        http_reply reply{200, std::move(made.json), {}};
        reply.tensors = std::move(made.tensors);
        if (!reply.tensors.empty()) reply.binary_header_length = reply.body.size();
        compress(reply, form.coding);
        return reply;
      },
      id);
}

}  // namespace sluice::server
