#include "runtime/server/http/endpoint_security.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <memory>
#include <string>

#include "runtime/server/http/access_log.hpp"
#include "tests/runtime/server/endpoint_fixture.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr auto const* right_header = "Authorization: Bearer swordfish\r\n";
constexpr auto const* wrong_header = "Authorization: Bearer swordfisch\r\n";

class guarded_endpoint : public endpoint_test {
 protected:
  guarded_endpoint() : endpoint_test(transport::plain) {
    options_.security = std::make_shared<endpoint_security>(security_files{file_.path()});
  }
  written_file file_{"tokens", "swordfish\nanother\n"};
};

TEST_F(guarded_endpoint, answers_whoever_has_a_token) {
  auto connection = client();
  for (int i = 0; i < 3; ++i) {
    connection.request("POST", "/v2/models/add/infer", addition(1, 2), right_header);
    EXPECT_EQ(sum_in(connection.read_response()), 3.0F);
  }
  EXPECT_EQ(once("GET", "/v2", {}, "authorization: bearer another\r\n").status, 200);
}

TEST_F(guarded_endpoint, refuses_all_others_at_every_route_but_health) {
  for (auto const* const target :
       {"/v2", "/metrics", "/v2/sluice/status", "/v2/models/add", "/v2/models/stats",
        "/v2/models/none", "/nothing", "/v2/models/%zz", "/v2/health", "/v2/repository/index"}) {
    for (auto const* const headers :
         {"", wrong_header, "Authorization: Basic swordfish\r\n", "Authorization: Bearer\r\n"}) {
      auto const response = once("GET", target, {}, headers);
      EXPECT_EQ(response.status, 401) << target << headers;
      EXPECT_EQ(response.headers.at("WWW-Authenticate"), "Bearer");
      EXPECT_THAT(error_in(response),
                  AllOf(HasSubstr("Authorization: Bearer"), Not(HasSubstr("swordfish"))));
    }
  }
  EXPECT_EQ(once("GET", "/v2", {}, std::string{right_header} + wrong_header).status, 401);
  for (auto const* const target :
       {"/v2/health/live", "/v2/health/ready", "http://h/v2/health/live/?x"}) {
    EXPECT_EQ(once("GET", target).status, 200) << target;
    EXPECT_EQ(once("POST", target, "{}").status, 401) << target;
  }
}

TEST_F(guarded_endpoint, refuses_before_it_reads_a_body) {
  for (auto const* const more :
       {"Content-Length: 67108864\r\n", "Expect: 100-continue\r\nContent-Length: 67108864\r\n",
        "Transfer-Encoding: chunked\r\n"}) {
    auto connection = client();
    connection.send(fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\n{}{}\r\n",
                                wrong_header, more));
    EXPECT_EQ(connection.read_response().status, 401) << more;
    EXPECT_TRUE(connection.ended());
  }
  auto health = client();
  health.send("GET /v2/health/live HTTP/1.1\r\nHost: h\r\nContent-Length: 67108864\r\n\r\n");
  EXPECT_EQ(health.read_response().status, 401);
}

TEST_F(guarded_endpoint, a_file_that_is_read_again_counts_from_then_on) {
  auto const status_with = [&](char const* headers) {
    return once("GET", "/v2", {}, headers).status;
  };
  EXPECT_EQ(status_with(right_header), 200U);
  file_.write("swordfisch\n");
  EXPECT_TRUE(options_.security->reload());
  EXPECT_EQ(status_with(right_header), 401U);
  EXPECT_EQ(status_with(wrong_header), 200U);

  for (auto const* const bad : {"", "two words"}) {
    file_.write(bad);
    EXPECT_FALSE(options_.security->reload());
    EXPECT_EQ(status_with(wrong_header), 200U) << bad;
  }
}

TEST_F(guarded_endpoint, tokens_stand_in_no_line_of_the_access_log) {
  written_file const log{"access.log", ""};
  options_.accesses = std::make_shared<access_log>(log.path().string());
  EXPECT_EQ(once("GET", "/v2?Bearer+swordfish", {}, wrong_header).status, 401);
  EXPECT_EQ(once("GET", "/v2", {}, right_header).status, 200);
  endpoint_->stop(long_time);
  endpoint_.reset();
  options_.accesses.reset();
  EXPECT_THAT(log.text(),
              AllOf(HasSubstr("status=401"), HasSubstr("cause=token"), Not(HasSubstr("swordfis"))));
}

TEST(endpoint_security, a_changed_file_is_read_once_nobody_writes_to_it) {
  written_file const file{"changing", "first\n"};
  endpoint_security security{{file.path()}};
  auto const allows = [&](char const* token) { return security.current()->tokens->allow(token); };
  security.reload_if_changed();
  EXPECT_TRUE(allows("Bearer first"));
  file.write("second\n");
  security.reload_if_changed();
  EXPECT_TRUE(allows("Bearer first"));  // it may still be written to
  security.reload_if_changed();
  EXPECT_TRUE(allows("Bearer second"));
  auto const before = security.current();
  security.reload_if_changed();
  EXPECT_EQ(security.current(), before);

  std::filesystem::remove(file.path());
  security.reload_if_changed();
  security.reload_if_changed();
  EXPECT_TRUE(allows("Bearer second"));
  file.write("third\n");
  security.reload_if_changed();
  security.reload_if_changed();
  EXPECT_TRUE(allows("Bearer third"));
}

TEST(endpoint_security, what_is_wrong_with_a_file_is_told_with_its_path) {
  written_file const file{"wrong", "fine\n"};
  auto const said = [&] {
    auto const failure = thrown_by([&] { endpoint_security const refused{{file.path()}}; });
    return failure ? failure->what() : std::string{};
  };
  EXPECT_EQ(said(), "");
  file.write("not fine\n");
  EXPECT_THAT(said(), AllOf(HasSubstr("server.token_file: " + file.path().string() + ": line 1"),
                            Not(HasSubstr("fine"))));
  file.write("fine\n", std::filesystem::perms{0640});
  EXPECT_THAT(said(), AllOf(HasSubstr("mode is 0640"), HasSubstr("chmod 600")));
  file.write("fine\n");
  auto const failure =
      thrown_by([&] { endpoint_security const refused{{file.path().string() + ".not"}}; });
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind(), error_kind::not_found);
  EXPECT_THAT(thrown_by([&] { endpoint_security const refused{{testing::TempDir()}}; })->what(),
              HasSubstr("no file"));
  written_file const pipe{"pipe", ""};
  std::filesystem::remove(pipe.path());
  ASSERT_EQ(::mkfifo(pipe.path().c_str(), 0600), 0);
  EXPECT_THAT(thrown_by([&] { endpoint_security const refused{{pipe.path()}}; })->what(),
              HasSubstr("no file"));
}

}  // namespace
}  // namespace sluice::server
