#include "runtime/server/grpc/calls.hpp"

#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <exception>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/grpc/inference.pb.h"

namespace sluice::server {
namespace {

using nlohmann::json;

template <typename Message>
Message read(std::string_view bytes) {
  Message result;
  if (!result.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    throw error{error_kind::invalid_argument, "the message is not one of this call"};
  }
  return result;
}

/// The message that has the same fields as the object.
template <typename Message>
std::string written(std::string const& object) {
  Message result;
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  auto const status = google::protobuf::util::JsonStringToMessage(object, &result, options);
  if (!status.ok()) {
    throw error{error_kind::internal,
                fmt::format("an answer does not fit its message: {}", status.ToString())};
  }
  return result.SerializeAsString();
}

template <typename Message>
call_reply reply_with(http_reply const& reply) {
  if (reply.status != 200) return failed_call(reply);
  return {200, written<Message>(reply.body)};
}

http_reply ask(oip_api const& api, route const& where, json const& body = nullptr) {
  auto const text = body.is_null() ? std::string{} : body.dump();
  return api.ask(where, {.method = body.is_null() ? "GET" : "POST", .target = {}, .body = text});
}

/// What has no resource of its own here is asked by its path.
http_reply post(oip_api const& api, std::string const& target, json const& body) {
  auto const text = body.dump();
  return std::get<http_reply>(api.handle({.method = "POST", .target = target, .body = text}));
}

std::string encoded_segment(std::string_view text) {
  std::string result;
  for (char const each : text) {
    auto const byte = static_cast<unsigned char>(each);
    result += std::isalnum(byte) != 0 ? std::string(1, each) : fmt::format("%{:02X}", byte);
  }
  return result;
}

// ---- one function for each call

call_reply server_live(oip_api const& api, std::string_view /*message*/) {
  return reply_with<inference::ServerLiveResponse>(ask(api, {resource::live, {}, {}}));
}

/// No is an answer, too; a reply without `ready` is a failure.
template <typename Message>
call_reply readiness_reply(http_reply const& reply) {
  auto const said = json::parse(reply.body);
  if (!said.contains("ready")) return failed_call(reply);
  return {200, written<Message>(json{{"ready", said["ready"]}}.dump())};
}

call_reply server_ready(oip_api const& api, std::string_view /*message*/) {
  return readiness_reply<inference::ServerReadyResponse>(ask(api, {resource::ready, {}, {}}));
}

template <resource what>
http_reply ask_of_model(oip_api const& api, std::string_view message) {
  auto const asked = read<inference::ModelQuestion>(message);
  return ask(api, {what, asked.name(), asked.version()});
}

call_reply model_ready(oip_api const& api, std::string_view message) {
  return readiness_reply<inference::ModelReadyResponse>(
      ask_of_model<resource::model_ready>(api, message));
}

call_reply server_metadata(oip_api const& api, std::string_view /*message*/) {
  return reply_with<inference::ServerMetadataResponse>(
      ask(api, {resource::server_metadata, {}, {}}));
}

call_reply model_metadata_of(oip_api const& api, std::string_view message) {
  return reply_with<inference::ModelMetadataResponse>(
      ask_of_model<resource::model_metadata>(api, message));
}

call_reply model_config(oip_api const& api, std::string_view message) {
  auto reply = ask_of_model<resource::model_config>(api, message);
  if (reply.status == 200) reply.body = fmt::format(R"({{"config":{}}})", reply.body);
  return reply_with<inference::ModelConfigResponse>(reply);
}

call_reply model_statistics_of(oip_api const& api, std::string_view message) {
  return reply_with<inference::ModelStatisticsResponse>(
      ask_of_model<resource::statistics>(api, message));
}

call_reply repository_index(oip_api const& api, std::string_view message) {
  auto const asked = read<inference::RepositoryIndexRequest>(message);
  auto reply = ask(api, {resource::repository_index, {}, {}}, json{{"ready", asked.ready()}});
  if (reply.status == 200) reply.body = fmt::format(R"({{"models":{}}})", reply.body);
  return reply_with<inference::RepositoryIndexResponse>(reply);
}

json value_of(inference::ModelRepositoryParameter const& parameter, std::string const& name) {
  using choice = inference::ModelRepositoryParameter::ChoiceCase;
  switch (parameter.choice_case()) {
    case choice::kBoolParam:
      return parameter.bool_param();
    case choice::kInt64Param:
      return parameter.int64_param();
    case choice::kStringParam:
      return parameter.string_param();
    case choice::kBytesParam:
      throw error{error_kind::unsupported,
                  fmt::format("the parameter '{}' has the content of a file, which this server "
                              "does not take; put it into the repository",
                              name)};
    case choice::CHOICE_NOT_SET:
      break;
  }
  return nullptr;
}

template <bool is_load>
call_reply repository_model(oip_api const& api, std::string_view message) {
  auto const asked = read<inference::RepositoryModelRequest>(message);
  auto parameters = json::object();
  for (auto const& [name, value] : asked.parameters()) parameters[name] = value_of(value, name);
  return reply_with<inference::Empty>(
      post(api,
           fmt::format("/v2/repository/models/{}/{}", encoded_segment(asked.model_name()),
                       is_load ? "load" : "unload"),
           json{{"parameters", parameters}}));
}

/// None of them is there, whatever it is called with.
call_reply shared_memory(oip_api const& api, std::string_view message) {
  static_cast<void>(read<inference::RegionRequest>(message));
  return reply_with<inference::Empty>(post(api, "/v2/systemsharedmemory/status", json::object()));
}

call_reply trace_setting(oip_api const& api, std::string_view message) {
  auto const asked = read<inference::TraceSettings>(message);
  json wanted;
  for (auto const& [name, value] : asked.settings()) {
    auto const& texts = value.value();
    auto& into = wanted[name];
    if (texts.empty()) {
      into = nullptr;
    } else if (texts.size() == 1 && name != "trace_level") {
      into = texts[0];
    } else {
      into = std::vector<std::string>{texts.begin(), texts.end()};
    }
  }
  auto reply = ask(api, {resource::trace_setting, asked.model_name(), {}}, wanted);
  if (reply.status == 200) {
    json settings;
    auto const said = json::parse(reply.body);
    for (auto const& [name, value] : said.items()) {
      settings[name]["value"] = value.is_array() ? value : json::array({value});
    }
    reply.body = json{{"settings", settings}}.dump();
  }
  return reply_with<inference::TraceSettings>(reply);
}

json value_of(inference::LogSettings::Value const& value) {
  using choice = inference::LogSettings::Value::ChoiceCase;
  switch (value.choice_case()) {
    case choice::kBoolParam:
      return value.bool_param();
    case choice::kUint32Param:
      return value.uint32_param();
    case choice::kStringParam:
      return value.string_param();
    case choice::CHOICE_NOT_SET:
      break;
  }
  return nullptr;
}

call_reply log_setting(oip_api const& api, std::string_view message) {
  auto const asked = read<inference::LogSettings>(message);
  json wanted;
  for (auto const& [name, value] : asked.settings()) wanted[name] = value_of(value);
  auto reply = ask(api, {resource::logging, {}, {}}, wanted);
  if (reply.status == 200) {
    json settings;
    auto const said = json::parse(reply.body);
    for (auto const& [name, value] : said.items()) {
      auto const* const field = value.is_boolean()  ? "bool_param"
                                : value.is_string() ? "string_param"
                                                    : "uint32_param";
      settings[name][field] = value;
    }
    reply.body = json{{"settings", settings}}.dump();
  }
  return reply_with<inference::LogSettings>(reply);
}

struct call_row {
  std::string_view name;
  call_reply (*answer)(oip_api const& api, std::string_view message);
};

constexpr std::array table{
    call_row{"ServerLive", server_live},
    call_row{"ServerReady", server_ready},
    call_row{"ModelReady", model_ready},
    call_row{"ServerMetadata", server_metadata},
    call_row{"ModelMetadata", model_metadata_of},
    call_row{"ModelConfig", model_config},
    call_row{"ModelStatistics", model_statistics_of},
    call_row{"RepositoryIndex", repository_index},
    call_row{"RepositoryModelLoad", repository_model<true>},
    call_row{"RepositoryModelUnload", repository_model<false>},
    call_row{"SystemSharedMemoryStatus", shared_memory},
    call_row{"SystemSharedMemoryRegister", shared_memory},
    call_row{"SystemSharedMemoryUnregister", shared_memory},
    call_row{"CudaSharedMemoryStatus", shared_memory},
    call_row{"CudaSharedMemoryRegister", shared_memory},
    call_row{"CudaSharedMemoryUnregister", shared_memory},
    call_row{"TraceSetting", trace_setting},
    call_row{"LogSettings", log_setting},
};

call_row const* row_of(std::string_view name) noexcept {
  auto const* const found = std::find_if(
      table.begin(), table.end(), [name](call_row const& each) { return each.name == name; });
  return found == table.end() ? nullptr : found;
}

}  // namespace

bool is_call(std::string_view name) {
  return name == infer_call || name == stream_call || row_of(name) != nullptr;
}

bool is_public_call(std::string_view name) {
  return name == "ServerLive" || name == "ServerReady";
}

bool may_take_long(std::string_view name) {
  return name == "RepositoryModelLoad" || name == "RepositoryModelUnload";
}

call_reply answer_call(oip_api const& api, std::string_view name, std::string_view message) {
  auto const* const row = row_of(name);
  try {
    if (row == nullptr) {
      throw error{error_kind::unsupported, fmt::format("there is no call '{}'", name)};
    }
    return row->answer(api, message);
  } catch (error const& failure) {
    return failed_call(oip_api::from_error(failure));
  } catch (std::exception const& failure) {
    return failed_call(oip_api::from_error({error_kind::internal, failure.what()}));
  }
}

call_reply failed_call(http_reply const& reply) {
  auto const said = json::parse(reply.body, nullptr, false);
  return {reply.status, {}, said.value("error", ""), reply.retry_after, reply.cause};
}

int grpc_code_of(unsigned status) noexcept {
  switch (status) {
    case 200:
      return 0;  // OK
    case 400:
      return 3;  // INVALID_ARGUMENT
    case 401:
      return 16;  // UNAUTHENTICATED
    case 404:
      return 5;  // NOT_FOUND
    case 408:
    case 504:
      return 4;  // DEADLINE_EXCEEDED
    case 409:
      return 6;  // ALREADY_EXISTS
    case 413:
    case 429:
      return 8;  // RESOURCE_EXHAUSTED
    case 501:
      return 12;  // UNIMPLEMENTED
    case 503:
      return 14;  // UNAVAILABLE
    default:
      return 13;  // INTERNAL
  }
}

}  // namespace sluice::server
