#include "runtime/server/engines/engine_routes.hpp"

#include <algorithm>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/routes.hpp"

namespace sluice::server {
namespace {

/// Whether some server would take it for a step to another folder.
bool steps_away(std::string const& segment) {
  std::string part;
  for (auto const c : segment + '/') {
    if (c != '/' && c != '\\') {
      part += c;
      continue;
    }
    if (part == "." || part == "..") return true;
    part.clear();
  }
  return false;
}

bool is_own(std::vector<std::string> const& path) {
  return path.front() == "v2" || (path.front() == "metrics" && path.size() == 1);
}

}  // namespace

void engine_routes::add(std::string const& route, engine_route of) {
  constexpr std::string_view all_below{"/*"};
  bool const is_folder = route.ends_with(all_below);
  auto segments =
      path_segments(is_folder ? route.substr(0, route.size() - all_below.size()) : route);
  if (is_folder && segments == path{""}) segments.clear();
  (is_folder ? below_ : exact_)[std::move(segments)] = of;
}

void engine_routes::add_model(std::string const& name, std::size_t engine) {
  models_.emplace(name, engine);
}

/// Of /v2/models/NAME/infer, and the like. What a server says of a model without computing is this server's to say.
std::optional<engine_route> engine_routes::of_model(path const& segments) const {
  if (segments.size() < 4 || segments[0] != "v2" || segments[1] != "models") return std::nullopt;
  auto const model = models_.find(segments[2]);
  if (model == models_.end()) return std::nullopt;
  bool const has_version = segments[3] == "versions" && segments.size() == 6;
  if (!has_version && segments.size() != 4) return std::nullopt;
  auto const& verb = segments.back();
  if (verb != "infer" && verb != "generate" && verb != "generate_stream") return std::nullopt;
  return engine_route{engine_route::kind::path, model->second};
}

std::optional<engine_route> engine_routes::find(std::string_view target) const {
  if (exact_.empty() && below_.empty() && models_.empty()) return std::nullopt;
  auto segments = path_segments(target);
  auto found = of_model(segments);
  if (!found && is_own(segments)) return std::nullopt;
  if (auto const whole = exact_.find(segments); !found && whole != exact_.end()) {
    found = whole->second;
  }
  for (auto folder = segments; !found && !folder.empty();) {
    folder.pop_back();
    if (auto const fits = below_.find(folder); fits != below_.end()) found = fits->second;
  }
  if (found && std::any_of(segments.begin(), segments.end(), steps_away)) {
    throw error{error_kind::invalid_argument,
                "the path has \".\" or \"..\" in it, which an engine may take for another path; "
                "send the path that is meant"};
  }
  return found;
}

}  // namespace sluice::server
