#include "runtime/server/http/openai_form.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace sluice::server {
namespace {

using nlohmann::json;

constexpr std::size_t most_named = 32;

std::string text_of(json const& body) {
  return body.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string_view type_of(unsigned status) {
  if (status == 429) return "rate_limit_error";
  return status < 500 ? "invalid_request_error" : "server_error";
}

/// Of a refusal that no one has given another.
std::string_view code_of(unsigned status) {
  return status == 401 ? "invalid_api_key" : "";
}

json text_or_null(std::string_view text) {
  return text.empty() ? json(nullptr) : json(text);
}

std::string body_of(unsigned status, std::string_view message, openai_error const& about) {
  return text_of({{"error",
                   {{"message", message},
                    {"type", type_of(status)},
                    {"param", text_or_null(about.param)},
                    {"code", text_or_null(about.code.empty() ? code_of(status) : about.code)}}}});
}

}  // namespace

openai_resource openai_resource_of(std::string_view target) {
  auto const path = path_segments(target);
  if (path.size() < 2 || path[1] != "models") return {};
  if (path.size() == 2) return {openai_resource::kind::models, {}};
  auto name = path[2];  // a name with a slash comes encoded, and from some clients as it is
  for (std::size_t i = 3; i < path.size(); ++i) name += '/' + path[i];
  return {openai_resource::kind::one_model, std::move(name)};
}

http_reply openai_failure(unsigned status, std::string_view message, openai_error const& about) {
  auto reply = oip_api::failure(status, "");
  reply.body = body_of(status, message, about);
  return reply;
}

http_reply in_openai_form(http_reply reply) {
  if (reply.status < 400) return reply;
  auto const said = json::parse(reply.body, nullptr, false);
  auto const message = said.is_object() ? said.find("error") : said.end();
  if (message == said.end() || !message->is_string()) return reply;
  reply.body = body_of(reply.status, message->get_ref<std::string const&>(), {});
  return reply;
}

std::string openai_error_event(std::string_view target, std::string_view message) {
  constexpr unsigned status = 503;
  constexpr std::string_view responses{"/v1/responses"};
  if (!target.starts_with(responses)) {
    return fmt::format("data: {}\n\n", body_of(status, message, {}));
  }
  return fmt::format("event: error\ndata: {}\n\n", text_of({{"type", "error"},
                                                            {"code", type_of(status)},
                                                            {"message", message},
                                                            {"param", nullptr}}));
}

http_reply unknown_model(std::string_view name, std::vector<std::string> const& known) {
  auto const named = std::min(known.size(), most_named);
  auto const last = known.begin() + static_cast<std::ptrdiff_t>(named);
  return openai_failure(
      404,
      fmt::format("there is no model '{}' here; there {} {}{}", name,
                  known.size() == 1 ? "is" : "are", fmt::join(known.begin(), last, ", "),
                  named < known.size() ? fmt::format(" and {} more", known.size() - named) : ""),
      {.code = "model_not_found", .param = "model"});
}

http_reply model_list_reply(json const& models) {
  return {200, text_of({{"object", "list"}, {"data", models}}), {}};
}

std::optional<http_reply> one_model_reply(json const& models, std::string_view name) {
  auto const found = std::find_if(models.begin(), models.end(),
                                  [&](json const& each) { return each.value("id", "") == name; });
  if (found == models.end()) return std::nullopt;
  return http_reply{200, text_of(*found), {}};
}

}  // namespace sluice::server
