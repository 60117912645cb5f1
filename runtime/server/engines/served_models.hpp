/// The models of an engine that requests name, as OpenAI's clients list them. Pure.
///
///   served_models models{{"chat", "org/model"}, began};
///   models.learn(body);   // what the engine itself says of them, while it can be asked
///   models.list();        // objects such as {"id": "chat", "object": "model", …}
///
/// Of names that the engine does not list, while it lists others of them, nobody is told: it answers them with an error.
#pragma once

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace sluice::server {

class served_models {
 public:
  served_models(std::vector<std::string> names, std::chrono::system_clock::time_point began)
      : names_(std::move(names)), began_(began) {}

  [[nodiscard]] std::vector<std::string> const& names() const noexcept { return names_; }
  /// The body of its answer to GET /v1/models. What is none changes nothing.
  void learn(std::string const& body);
  /// Names that the engine does not list, if it has listed any.
  [[nodiscard]] std::vector<std::string> unlisted() const;
  [[nodiscard]] nlohmann::json list() const;

 private:
  std::vector<std::string> names_;
  std::chrono::system_clock::time_point began_;
  std::map<std::string, nlohmann::json> listed_;  ///< by the engine
};

}  // namespace sluice::server
