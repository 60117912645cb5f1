/// What a server says that was built without gRPC's library.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/server/grpc/grpc_endpoint.hpp"
#include "tests/runtime/server/adding_service.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

TEST(absent_grpc, is_refused_with_what_is_missing) {
  adding_service service;
  for (auto const& failure : {thrown_by([] { grpc_endpoint::require(); }), thrown_by([&service] {
                                grpc_endpoint const none{grpc_options{}, service};
                              })}) {
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->kind(), error_kind::unsupported);
    EXPECT_THAT(failure->what(), testing::HasSubstr("server.grpc_port: "));
    EXPECT_THAT(failure->what(), testing::HasSubstr("libgrpc++-dev"));
  }
}

}  // namespace
}  // namespace sluice::server
