#include "runtime/server/http/triton_settings.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <cstdint>
#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;
using spdlog::level::level_enum;

[[noreturn]] void invalid_setting(std::string const& message) {
  throw error{error_kind::invalid_argument, message};
}

std::string dumped(json const& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

void expect_object(json const& wanted, json const& known) {
  if (!wanted.is_object()) invalid_setting("settings are an object: {\"name\": value, …}");
  for (auto const& [name, value] : wanted.items()) {
    if (known.contains(name)) continue;
    std::string names;
    for (auto const& each : known.items()) names += (names.empty() ? "" : ", ") + each.key();
    invalid_setting(fmt::format("there is no setting '{}'; there are {}", name, names));
  }
}

json settings_of(level_enum level) {
  // Triton's levels of detail begin at 1
  int const detail = level == level_enum::trace ? 2 : level == level_enum::debug ? 1 : 0;
  return {{"log_file", ""},
          {"log_info", level <= level_enum::info},
          {"log_warning", level <= level_enum::warn},
          {"log_error", level <= level_enum::err},
          {"log_verbose_level", detail},
          {"log_format", "default"}};
}

/// Here a level has those above it: nothing else can be asked for.
level_enum level_of(json const& settings) {
  auto const detail = settings.at("log_verbose_level").get<std::uint64_t>();
  bool const info = settings.at("log_info").get<bool>();
  bool const warning = settings.at("log_warning").get<bool>();
  bool const failure = settings.at("log_error").get<bool>();
  if ((detail > 0 && !info) || (info && !warning) || (warning && !failure)) {
    throw error{error_kind::unsupported,
                "this server's log has levels: log_verbose_level above 0 takes log_info, which "
                "takes log_warning, which takes log_error"};
  }
  if (detail > 0) return detail == 1 ? level_enum::debug : level_enum::trace;
  if (info) return level_enum::info;
  if (warning) return level_enum::warn;
  return failure ? level_enum::err : level_enum::off;
}

}  // namespace

json log_settings() {
  return settings_of(spdlog::get_level());
}

json update_log_settings(json const& wanted) {
  auto const before = spdlog::get_level();
  auto settings = settings_of(before);
  expect_object(wanted, settings);
  for (auto const& [name, value] : wanted.items()) {
    bool const fits = name == "log_verbose_level" ? value.is_number_unsigned()
                                                  : value.type() == settings[name].type();
    if (!fits) {
      invalid_setting(fmt::format("'{}' is {}; it takes {}", name, dumped(value),
                                  name == "log_verbose_level"   ? "an integer of at least 0"
                                  : settings[name].is_boolean() ? "true or false"
                                                                : "a string"));
    }
    if (value.is_string() && value != settings[name]) {
      throw error{error_kind::unsupported,
                  fmt::format("'{}' cannot be {}; the log goes to standard error, in one format",
                              name, dumped(value))};
    }
    settings[name] = value;
  }
  auto const after = level_of(settings);
  if (after != before) {
    spdlog::set_level(after);
    auto const text = spdlog::level::to_string_view(after);
    spdlog::warn("a client has set the level of the log level={}",
                 std::string_view{text.data(), text.size()});
  }
  return settings_of(after);
}

json trace_settings() {
  return {{"trace_level", json::array({"OFF"})},
          {"trace_rate", "1000"},
          {"trace_count", "-1"},
          {"log_frequency", "0"},
          {"trace_file", ""},
          {"trace_mode", "triton"}};
}

json update_trace_settings(json const& wanted) {
  auto const settings = trace_settings();
  expect_object(wanted, settings);
  for (auto const& [name, value] : wanted.items()) {
    // null clears a setting, in Triton, and leaves its default
    bool const is_off = name == "trace_level" && value == "OFF";
    if (value.is_null() || value == settings[name] || is_off) continue;
    throw error{error_kind::unsupported,
                fmt::format("'{}' cannot be {}: this server traces no requests; its metrics and "
                            "statistics say where their time went",
                            name, dumped(value))};
  }
  return settings;
}

}  // namespace sluice::server
