#include "runtime/server/engines/engine_routes.hpp"

#include <gtest/gtest.h>

#include "memhandover/base/error.hpp"

namespace sluice::server {
namespace {

engine_routes made(std::initializer_list<std::pair<char const*, std::size_t>> routes) {
  engine_routes result;
  for (auto const& [route, engine] : routes) {
    result.add(route, {engine_route::kind::path, engine});
  }
  return result;
}

std::optional<engine_route> engine(std::size_t which) {
  return engine_route{engine_route::kind::path, which};
}

TEST(engine_routes, the_longest_route_that_fits_counts) {
  auto const routes = made({{"/v1/*", 0}, {"/v1/embeddings", 1}, {"/v1/files/*", 2}, {"/", 3}});
  EXPECT_EQ(routes.find("/v1/chat/completions"), engine(0));
  EXPECT_EQ(routes.find("/v1/embeddings"), engine(1));
  EXPECT_EQ(routes.find("/v1/embeddings?a=/b"), engine(1));
  EXPECT_EQ(routes.find("/v1/embeddings/"), engine(1));
  EXPECT_EQ(routes.find("/v1/embeddings/x"), engine(0));
  EXPECT_EQ(routes.find("/v1/files/7"), engine(2));
  EXPECT_EQ(routes.find("/v1/files"), engine(0));
  EXPECT_EQ(routes.find("/v1"), std::nullopt);
  EXPECT_EQ(routes.find("/"), engine(3));
  EXPECT_EQ(routes.find("/v2"), std::nullopt);
  EXPECT_EQ(routes.find("http://host:1/v1/chat"), engine(0));
  EXPECT_EQ(routes.find("/v1/%65mbeddings"), engine(1));  // as the engine will read it
}

TEST(engine_routes, what_the_server_answers_itself_is_no_engines) {
  auto const routes = made({{"/*", 0}});
  EXPECT_EQ(routes.find("/anything/at/all"), engine(0));
  EXPECT_EQ(routes.find("/metrics/x"), engine(0));
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
  EXPECT_EQ(routes.find("/v1/a..b"), engine(0));
  EXPECT_EQ(routes.find("/v1/org%2Fmodel"), engine(0));
  EXPECT_THROW((void)routes.find("/v1/%zz"), error);
}

TEST(engine_routes, what_is_led_by_its_model_lies_beside_what_is_led_by_its_path) {
  engine_routes routes;
  routes.add("/*", {engine_route::kind::path, 3});
  routes.add("/v1/*", {engine_route::kind::model});
  routes.add("/v1/audio/*", {engine_route::kind::path, 1});
  EXPECT_EQ(routes.find("/v1/chat/completions")->by, engine_route::kind::model);
  EXPECT_EQ(routes.find("/v1/models/org%2Fmodel")->by, engine_route::kind::model);
  EXPECT_EQ(routes.find("/v1/audio/speech"), engine(1));
  EXPECT_EQ(routes.find("/tokenize"), engine(3));
}

TEST(engine_routes, a_model_of_the_open_inference_protocol_computes_at_its_engine) {
  engine_routes routes;
  routes.add_model("resnet", 2);
  for (auto const* const target :
       {"/v2/models/resnet/infer", "/v2/models/resnet/versions/3/infer?x=1",
        "/v2/models/resn%65t/infer", "/v2/models/resnet/generate_stream"}) {
    EXPECT_EQ(routes.find(target), engine(2)) << target;
  }
  for (auto const* const target :
       {"/v2/models/resnet", "/v2/models/resnet/ready", "/v2/models/resnet/config",
        "/v2/models/resnet/versions/3", "/v2/models/resnet/versions/3/ready", "/v2/models/stats",
        "/v2/models/other/infer", "/v2/models/resnet/stats", "/v2/models/resnet/x/infer",
        "/v2/health/ready", "/x/models/resnet/infer"}) {
    EXPECT_EQ(routes.find(target), std::nullopt) << target;
  }
  EXPECT_THROW((void)routes.find("/v2/models/resnet/versions/../infer"), error);
}

TEST(engine_routes, without_routes_nothing_is_looked_at) {
  EXPECT_EQ(engine_routes{}.find("/%zz"), std::nullopt);
}

}  // namespace
}  // namespace sluice::server
