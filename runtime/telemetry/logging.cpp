#include "runtime/telemetry/logging.hpp"

#include <fmt/format.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace sluice::telemetry {
namespace {

using level = spdlog::level::level_enum;

constexpr std::array<std::pair<std::string_view, level>, 6> levels{{{"trace", level::trace},
                                                                    {"debug", level::debug},
                                                                    {"info", level::info},
                                                                    {"warn", level::warn},
                                                                    {"error", level::err},
                                                                    {"off", level::off}}};

std::optional<level> level_of(std::string_view name) {
  for (auto const& [known, value] : levels) {
    if (known == name) {
      return value;
    }
  }
  return std::nullopt;
}

}  // namespace

std::unique_ptr<spdlog::formatter> make_line_formatter() {
  return std::make_unique<spdlog::pattern_formatter>("%Y-%m-%dT%H:%M:%S.%fZ %l %n[%P] %v",
                                                     spdlog::pattern_time_type::utc);
}

void set_up_logging(std::string const& program, std::string_view default_level) {
  char const* wanted = std::getenv("SLUICE_LOG");
  bool const given = wanted != nullptr && *wanted != '\0';
  auto const chosen = given ? level_of(wanted) : level_of(default_level);

  auto logger =
      std::make_shared<spdlog::logger>(program, std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(make_line_formatter());
  logger->set_level(chosen.value_or(level_of(default_level).value_or(level::info)));
  // spdlog lets go of it as the process ends, while a control thread may still have something to say: they are never freed.
  static auto* const kept = new std::vector<std::shared_ptr<spdlog::logger>>;
  kept->push_back(logger);
  spdlog::set_default_logger(std::move(logger));
  if (!chosen) {
    spdlog::warn("SLUICE_LOG names no level value={} known=trace,debug,info,warn,error,off used={}",
                 quoted(given ? wanted : default_level), default_level);
  }
}

std::string quoted(std::string_view text) {
  std::string result{'"'};
  for (char const c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      result += c;
    }
  }
  return result + '"';
}

}  // namespace sluice::telemetry
