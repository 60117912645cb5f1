#include "runtime/server/http/routes.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

TEST(routes, every_resource_has_its_path) {
  struct row {
    std::string target;
    resource what;
    std::string model = {};
    std::string version = {};
  };
  std::vector<row> const rows{
      {"/v2", resource::server_metadata},
      {"/v2/", resource::server_metadata},
      {"/v2?x=1", resource::server_metadata},
      {"http://localhost:8000/v2", resource::server_metadata},
      {"/v2/health/live", resource::live},
      {"/v2/health/ready", resource::ready},
      {"/v2/models/m", resource::model_metadata, "m"},
      {"/v2/models/stats", resource::statistics},
      {"/v2/models/stats/", resource::statistics},
      {"/v2/models/stats/stats", resource::statistics, "stats"},
      {"/v2/models/stats/infer", resource::infer, "stats"},
      {"/v2/models/stats/versions/3", resource::model_metadata, "stats", "3"},
      {"/v2/models/m/versions/3", resource::model_metadata, "m", "3"},
      {"/v2/models/m/ready", resource::model_ready, "m"},
      {"/v2/models/m/versions/3/ready/", resource::model_ready, "m", "3"},
      {"/v2/models/m/config", resource::model_config, "m"},
      {"/v2/models/m/infer", resource::infer, "m"},
      {"/v2/models/m/versions/3/infer?a=/b", resource::infer, "m", "3"},
      {"/v2/models/a%2Fb%20%C3%A9+/infer", resource::infer, "a/b \xC3\xA9+"},
      {"/v2/models/versions/infer", resource::infer, "versions"},
      {"/%762/models/m", resource::model_metadata, "m"},
      {"/v2/repository/index", resource::repository_index},
      {"/v2/repository/models/m/load", resource::repository_load, "m"},
      {"/v2/repository/models/m/unload", resource::repository_unload, "m"},
      {"/v2/models/m/stats", resource::statistics, "m"},
      {"/v2/models/m/versions/3/stats", resource::statistics, "m", "3"},
      {"/v2/models/m/trace/setting", resource::trace_setting, "m"},
      {"/v2/models/m/versions/3/trace/setting", resource::trace_setting, "m", "3"},
      {"/v2/trace/setting", resource::trace_setting},
      {"/v2/logging", resource::logging},
      {"/v2/systemsharedmemory/status", resource::extension},
      {"/v2/sluice/status", resource::status},
      {"/metrics", resource::metrics},
      {"/metrics/", resource::metrics},
  };
  for (auto const& each : rows) {
    auto const found = parse_target(each.target);
    ASSERT_TRUE(found.has_value()) << each.target;
    EXPECT_EQ(found->what, each.what) << each.target;
    EXPECT_EQ(found->model, each.model) << each.target;
    EXPECT_EQ(found->version, each.version) << each.target;
  }
}

TEST(routes, other_paths_lead_nowhere) {
  for (auto const* const target : {"",
                                   "/",
                                   "*",
                                   "/v1",
                                   "/metrics/more",
                                   "/v2/metrics",
                                   "/v2/nothing",
                                   "/v2/health",
                                   "/v2/health/other",
                                   "/v2/models",
                                   "/v2/models/",
                                   "/v2//models/m",
                                   "/v2/models//infer",
                                   "/v2/models/m/versions",
                                   "/v2/models/m/versions//infer",
                                   "/v2/models/m/infer/more",
                                   "/v2/models/m/infer/setting",
                                   "/v2/models/m/trace/other",
                                   "/v2/models/m/trace/setting/more",
                                   "/v2/models/m/other",
                                   "/v2/repository",
                                   "/v2/sluice",
                                   "/V2",
                                   "http://host",
                                   "/v2/models/../health/live"}) {
    EXPECT_FALSE(parse_target(target).has_value()) << target;
  }
}

TEST(routes, malformed_encoding_is_told_from_an_unknown_path) {
  for (auto const* const target :
       {"/v2/models/%", "/v2/models/a%2", "/v2/models/%zz/infer", "/v2/models/%FF",
        "/v2/models/a%00b", "/v2/models/%C3/infer", "/%"}) {
    auto const failure = thrown_by([&] { static_cast<void>(parse_target(target)); });
    ASSERT_TRUE(failure.has_value()) << target;
    EXPECT_EQ(failure->kind(), error_kind::invalid_argument) << target;
  }
}

}  // namespace
}  // namespace sluice::server
