#include "runtime/server/engines/described_models.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;

constexpr std::string_view config_ending{"/config"};
/// Of one model, that are asked after.
constexpr std::size_t most_versions = 16;

std::string path_of(std::string const& name, std::string const& version) {
  return version.empty() ? "/v2/models/" + name
                         : fmt::format("/v2/models/{}/versions/{}", name, version);
}

/// Whether it may stand in a path as it is.
bool is_plain(std::string const& version) {
  return !version.empty() && version.find_first_not_of("0123456789") == std::string::npos;
}

std::optional<tensor_spec> tensor_of(json const& said) {
  if (!said.is_object()) return std::nullopt;
  auto const name = said.find("name"), type = said.find("datatype"), shape = said.find("shape");
  bool const is_whole = name != said.end() && name->is_string() && type != said.end() &&
                        type->is_string() && shape != said.end() && shape->is_array();
  auto const is_integer = [](json const& each) { return each.is_number_integer(); };
  if (!is_whole || !std::all_of(shape->begin(), shape->end(), is_integer)) return std::nullopt;
  auto const known = datatype_from_name(type->get_ref<std::string const&>());
  if (!known) return std::nullopt;
  return tensor_spec{.name = name->get<std::string>(),
                     .type = *known,
                     .shape = shape->get<std::vector<std::int64_t>>()};
}

std::optional<std::vector<tensor_spec>> tensors_of(json const& said, char const* key) {
  std::vector<tensor_spec> made;
  auto const list = said.find(key);
  if (list == said.end()) return made;
  if (!list->is_array()) return std::nullopt;
  for (auto const& each : *list) {
    auto tensor = tensor_of(each);
    if (!tensor) return std::nullopt;
    made.push_back(std::move(*tensor));
  }
  return made;
}

std::vector<std::string> versions_of(json const& said) {
  std::vector<std::string> made;
  auto const list = said.find("versions");
  if (list == said.end() || !list->is_array()) return made;
  for (auto const& each : *list) {
    if (each.is_string()) made.push_back(each.get<std::string>());
  }
  return made;
}

std::optional<model_metadata> metadata_of(json const& said) {
  if (!said.is_object()) return std::nullopt;
  auto inputs = tensors_of(said, "inputs"), outputs = tensors_of(said, "outputs");
  if (!inputs || !outputs) return std::nullopt;
  auto const platform = said.find("platform");
  return model_metadata{.name = {},
                        .versions = versions_of(said),
                        .platform = platform != said.end() && platform->is_string()
                                        ? platform->get<std::string>()
                                        : std::string{},
                        .inputs = std::move(*inputs),
                        .outputs = std::move(*outputs)};
}

}  // namespace

std::vector<std::string> described_models::questions() const {
  std::vector<std::string> paths;
  for (auto const& name : names_) {
    paths.push_back(path_of(name, ""));
    paths.push_back(path_of(name, "") + std::string{config_ending});
  }
  return paths;
}

std::vector<std::string> described_models::learn(std::string const& path, std::string const& body) {
  auto said = json::parse(body, nullptr, false);
  bool const is_config = path.ends_with(config_ending);
  if (!said.is_object() || (!is_config && !metadata_of(said))) return {};
  std::vector<std::string> more;
  bool const is_of_all = std::any_of(names_.begin(), names_.end(),
                                     [&](auto const& name) { return path == path_of(name, ""); });
  if (is_of_all) {
    for (auto const& version : versions_of(said)) {
      if (!is_plain(version) || more.size() >= 2 * most_versions) continue;
      more.push_back(fmt::format("{}/versions/{}", path, version));
      more.push_back(fmt::format("{}/versions/{}{}", path, version, config_ending));
    }
  }
  said_[path] = std::move(said);
  return more;
}

std::optional<model_metadata> described_models::metadata(std::string const& name,
                                                         std::string const& version) const {
  auto const said = said_.find(path_of(name, version));
  if (said == said_.end()) return std::nullopt;
  auto made = metadata_of(said->second);
  if (made) made->name = name;
  return made;
}

std::optional<json> described_models::config(std::string const& name,
                                             std::string const& version) const {
  auto const said = said_.find(path_of(name, version) + std::string{config_ending});
  return said == said_.end() ? std::nullopt : std::optional{said->second};
}

}  // namespace sluice::server
