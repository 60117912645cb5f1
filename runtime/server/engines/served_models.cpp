#include "runtime/server/engines/served_models.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace sluice::server {

using nlohmann::json;

void served_models::learn(std::string const& body) {
  auto const said = json::parse(body, nullptr, false);
  if (!said.is_object()) return;
  auto const data = said.find("data");
  if (data == said.end() || !data->is_array()) return;
  std::map<std::string, json> listed;
  for (auto const& each : *data) {
    if (!each.is_object()) continue;
    auto const id = each.find("id");
    if (id != each.end() && id->is_string()) listed.emplace(id->get<std::string>(), each);
  }
  listed_ = std::move(listed);
}

std::vector<std::string> served_models::unlisted() const {
  std::vector<std::string> missing;
  std::copy_if(names_.begin(), names_.end(), std::back_inserter(missing),
               [&](auto const& name) { return !listed_.contains(name); });
  return missing.size() == names_.size() && listed_.empty() ? std::vector<std::string>{} : missing;
}

json served_models::list() const {
  auto const missing = unlisted();
  bool const leaves_out = missing.size() < names_.size();
  auto made = json::array();
  for (auto const& name : names_) {
    if (auto const its = listed_.find(name); its != listed_.end()) {
      made.push_back(its->second);
    } else if (!leaves_out || missing.empty()) {
      made.push_back({{"id", name},
                      {"object", "model"},
                      {"created", std::chrono::system_clock::to_time_t(began_)},
                      {"owned_by", "sluice"},
                      {"root", name}});
    }
  }
  return made;
}

}  // namespace sluice::server
