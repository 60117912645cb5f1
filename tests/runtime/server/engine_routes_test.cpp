#include "runtime/server/engines/engine_routes.hpp"

#include <gtest/gtest.h>

#include "memhandover/base/error.hpp"

namespace sluice::server {
namespace {

engine_routes made(std::initializer_list<std::pair<char const*, std::size_t>> routes) {
  engine_routes result;
  for (auto const& [route, engine] : routes) {
    result.add(route, engine);
  }
  return result;
}

TEST(engine_routes, the_longest_route_that_fits_counts) {
  auto const routes = made({{"/v1/*", 0}, {"/v1/embeddings", 1}, {"/v1/files/*", 2}, {"/", 3}});
  EXPECT_EQ(routes.find("/v1/chat/completions"), 0U);
  EXPECT_EQ(routes.find("/v1/embeddings"), 1U);
  EXPECT_EQ(routes.find("/v1/embeddings?a=/b"), 1U);
  EXPECT_EQ(routes.find("/v1/embeddings/"), 1U);
  EXPECT_EQ(routes.find("/v1/embeddings/x"), 0U);
  EXPECT_EQ(routes.find("/v1/files/7"), 2U);
  EXPECT_EQ(routes.find("/v1/files"), 0U);
  EXPECT_EQ(routes.find("/v1"), std::nullopt);
  EXPECT_EQ(routes.find("/"), 3U);
  EXPECT_EQ(routes.find("/v2"), std::nullopt);
  EXPECT_EQ(routes.find("http://host:1/v1/chat"), 0U);
  EXPECT_EQ(routes.find("/v1/%65mbeddings"), 1U);  // as the engine will read it
}

TEST(engine_routes, what_the_server_answers_itself_is_no_engines) {
  auto const routes = made({{"/*", 0}});
  EXPECT_EQ(routes.find("/anything/at/all"), 0U);
  EXPECT_EQ(routes.find("/metrics/x"), 0U);
  for (auto const* const own : {"/v2", "/v2/models/m/infer", "/metrics", "/v2/health/ready"}) {
    EXPECT_EQ(routes.find(own), std::nullopt) << own;
  }
}

TEST(engine_routes, a_path_that_may_mean_another_one_is_refused) {
  auto const routes = made({{"/v1/*", 0}});
  for (auto const* const target : {"/v1/../admin", "/v1/./x", "/v1/%2e%2e/admin", "/v1/..%2fadmin",
                                   "/v1/x%2F..%2Fadmin", "/v1/..%5cadmin", "/v1/x/.."}) {
    EXPECT_THROW((void)routes.find(target), error) << target;
  }
  EXPECT_EQ(routes.find("/v1/a..b"), 0U);
  EXPECT_EQ(routes.find("/v1/org%2Fmodel"), 0U);
  EXPECT_THROW((void)routes.find("/v1/%zz"), error);
}

TEST(engine_routes, without_routes_nothing_is_looked_at) {
  EXPECT_EQ(engine_routes{}.find("/%zz"), std::nullopt);
}

}  // namespace
}  // namespace sluice::server
