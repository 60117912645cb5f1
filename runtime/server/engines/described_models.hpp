/// What an engine that speaks the Open Inference Protocol has said of its models, for when it is not to be asked. Pure.
///
///   described_models models{{"encoder"}};
///   models.questions();                        // "/v2/models/encoder", …
///   models.learn("/v2/models/encoder", body);  // what to ask besides: of its versions
///   models.metadata("encoder", "")->inputs;
///
/// Source: Open Inference Protocol V2 (HTTP/REST), "Model Metadata"; Triton's model_configuration extension.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

class described_models {
 public:
  explicit described_models(std::vector<std::string> names) : names_(std::move(names)) {}

  /// Paths to ask for; what they answer with 200 goes to `learn`.
  [[nodiscard]] std::vector<std::string> questions() const;
  /// More paths. What is not what such an answer is changes nothing.
  std::vector<std::string> learn(std::string const& path, std::string const& body);

  /// Nothing: it has not said. An empty version is that which the engine takes by itself.
  [[nodiscard]] std::optional<model_metadata> metadata(std::string const& name,
                                                       std::string const& version) const;
  [[nodiscard]] std::optional<nlohmann::json> config(std::string const& name,
                                                     std::string const& version) const;

 private:
  std::vector<std::string> names_;
  std::map<std::string, nlohmann::json> said_;  ///< by path
};

}  // namespace sluice::server
