#include "runtime/server/http/routes.hpp"

#include <fmt/format.h>

#include <array>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string decode_segment(std::string_view segment) {
  std::string text;
  for (std::size_t i = 0; i < segment.size(); ++i) {
    if (segment[i] != '%') {
      text.push_back(segment[i]);
      continue;
    }
    int const high = i + 2 < segment.size() ? hex_digit(segment[i + 1]) : -1;
    int const low = i + 2 < segment.size() ? hex_digit(segment[i + 2]) : -1;
    if (high < 0 || low < 0) {
      throw error{
          error_kind::invalid_argument,
          fmt::format(
              "the path segment '{}' is not percent-encoded properly; '%' takes two hexadecimal "
              "digits, and is itself written %25",
              segment)};
    }
    text.push_back(static_cast<char>(high * 16 + low));
    i += 2;
  }
  if (!is_utf8(text) || text.find('\0') != std::string::npos) {
    throw error{error_kind::invalid_argument, "a path segment does not decode to UTF-8 text"};
  }
  return text;
}

/// What may follow v2/models/M or v2/models/M/versions/V.
std::optional<resource> model_resource(std::string_view verb) {
  if (verb == "infer") return resource::infer;
  if (verb == "ready") return resource::model_ready;
  if (verb == "config") return resource::model_config;
  if (verb == "stats") return resource::statistics;
  if (verb == "trace" || verb == "generate" || verb == "generate_stream") {
    return resource::extension;
  }
  return std::nullopt;
}

std::optional<route> model_route(std::vector<std::string> const& path) {
  route result;
  if (path.size() < 3 || path[2].empty()) return std::nullopt;
  // As Triton has it: what a model of that name is, /v2/models/stats/versions/V says.
  if (path.size() == 3 && path[2] == "stats") return route{resource::statistics, {}, {}};
  result.model = path[2];
  std::size_t next = 3;
  if (path.size() > next && path[next] == "versions") {
    if (path.size() == next + 1 || path[next + 1].empty()) return std::nullopt;
    result.version = path[next + 1];
    next += 2;
  }
  if (path.size() == next) {
    result.what = resource::model_metadata;
    return result;
  }
  auto const what = model_resource(path[next]);
  bool const is_setting =
      path[next] == "trace" && path.size() == next + 2 && path[next + 1] == "setting";
  if (!what || (path.size() != next + 1 && !is_setting)) return std::nullopt;
  result.what = is_setting ? resource::trace_setting : *what;
  return result;
}

}  // namespace

std::vector<std::string> path_segments(std::string_view target) {
  if (auto const scheme = target.find("://");
      scheme != std::string_view::npos && !target.starts_with('/')) {
    target.remove_prefix(scheme + 3);
    target.remove_prefix(std::min(target.find('/'), target.size()));
  }
  target = target.substr(0, target.find_first_of("?#"));
  if (target.starts_with('/')) target.remove_prefix(1);
  if (target.ends_with('/')) target.remove_suffix(1);
  std::vector<std::string> segments;
  while (true) {
    auto const slash = target.find('/');
    segments.push_back(decode_segment(target.substr(0, slash)));
    if (slash == std::string_view::npos) return segments;
    target.remove_prefix(slash + 1);
  }
}

std::optional<route> parse_target(std::string_view target) {
  auto const path = path_segments(target);
  if (path[0] == "metrics" && path.size() == 1) return route{resource::metrics, {}, {}};
  if (path[0] != "v2") return std::nullopt;
  if (path.size() == 1) return route{};
  auto const& area = path[1];
  if (area == "models") return model_route(path);
  if (area == "health" && path.size() == 3) {
    if (path[2] == "live") return route{resource::live, {}, {}};
    if (path[2] == "ready") return route{resource::ready, {}, {}};
  }
  if (area == "repository") {
    if (path.size() == 3 && path[2] == "index") return route{resource::repository_index, {}, {}};
    if (path.size() == 5 && path[2] == "models" && path[4] == "load") {
      return route{resource::repository_load, path[3], {}};
    }
    if (path.size() == 5 && path[2] == "models" && path[4] == "unload") {
      return route{resource::repository_unload, path[3], {}};
    }
  }
  if (area == "sluice" && path.size() == 3 && path[2] == "status") {
    return route{resource::status, {}, {}};
  }
  if (area == "trace" && path.size() == 3 && path[2] == "setting") {
    return route{resource::trace_setting, {}, {}};
  }
  if (area == "logging" && path.size() == 2) return route{resource::logging, {}, {}};
  if (area == "systemsharedmemory" || area == "cudasharedmemory" || area == "trace" ||
      area == "logging") {
    return route{resource::extension, {}, {}};
  }
  return std::nullopt;
}

std::string_view allowed_methods(resource what) noexcept {
  switch (what) {
    case resource::infer:
    case resource::repository_index:
    case resource::repository_load:
    case resource::repository_unload:
      return "POST";
    case resource::trace_setting:
    case resource::logging:
      return "GET, HEAD, POST";
    case resource::extension:
      return "";
    default:
      return "GET, HEAD";
  }
}

}  // namespace sluice::server
