/// Whose a request's target is. Pure.
///
///   engine_routes routes;
///   routes.add("/v1/*", {engine_route::kind::model});
///   routes.add("/v1/embeddings", {engine_route::kind::path, 1});
///   routes.find("/v1/embeddings?x=1");   // the engine 1: the longest that fits
///   routes.find("/v1/chat");             // that of the model that the body names
///   routes.find("/v2");                  // nothing: the server's own
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/inference/engine_gateway.hpp"

namespace sluice::server {

class engine_routes {
 public:
  /// As the policy has it: with "/*" at its end it stands for all that lies below.
  void add(std::string const& route, engine_route of);

  /// A model of the Open Inference Protocol, whose requests to compute are that engine's.
  void add_model(std::string const& name, std::size_t engine);

  /// Throws `invalid_argument` for a path that is not percent-encoded properly, or whose parts might be taken for the way to
  /// another one ("..", also with its slashes encoded).
  [[nodiscard]] std::optional<engine_route> find(std::string_view target) const;

 private:
  using path = std::vector<std::string>;

  [[nodiscard]] std::optional<engine_route> of_model(path const& segments) const;

  std::map<path, engine_route> exact_, below_;
  std::map<std::string, std::size_t> models_;
};

}  // namespace sluice::server
