/// Which engine a request's target belongs to. Pure.
///
///   engine_routes routes;
///   routes.add("/v1/*", 0);
///   routes.add("/v1/embeddings", 1);
///   routes.find("/v1/embeddings?x=1");   // 1: the longest that fits
///   routes.find("/v1/chat");             // 0
///   routes.find("/v2");                  // nothing: the server's own
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::server {

class engine_routes {
 public:
  /// As the policy has it: with "/*" at its end it stands for all that lies below.
  void add(std::string const& route, std::size_t engine);

  /// Throws `invalid_argument` for a path that is not percent-encoded properly, or whose parts might be taken for the way to
  /// another one ("..", also with its slashes encoded).
  [[nodiscard]] std::optional<std::size_t> find(std::string_view target) const;

 private:
  using path = std::vector<std::string>;

  std::map<path, std::size_t> exact_, below_;
};

}  // namespace sluice::server
