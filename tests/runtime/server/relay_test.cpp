/// The endpoint and an engine that says byte for byte what a test has it say.
#include <gtest/gtest.h>

#include <future>
#include <string>

#include "tests/runtime/server/relay_fixture.hpp"

namespace sluice::server {
namespace {

INSTANTIATE_TEST_SUITE_P(over, relayed, testing::Values(transport::plain, transport::tls));

constexpr auto const* get = "GET /e/x HTTP/1.1\r\nHost: h\r\n\r\n";

TEST_P(relayed, an_answer_and_the_next_request_pass_on_one_connection) {
  auto connection = client();
  for (auto const* const text : {"first", "second"}) {
    connection.send(get);
    auto side = engine_.accept();
    auto const head = side.read_head();
    EXPECT_TRUE(head.starts_with("GET /e/x HTTP/1.1\r\n")) << head;
    EXPECT_NE(head.find("Connection: close\r\n"), std::string::npos) << head;
    EXPECT_NE(head.find("X-Forwarded-For: 127.0.0.1\r\n"), std::string::npos) << head;
    EXPECT_TRUE(side.say("HTTP/1.1 200 OK\r\nContent-Length: " +
                         std::to_string(std::string_view{text}.size()) + "\r\n\r\n" + text));
    EXPECT_EQ(connection.read_response().body, text);
    EXPECT_EQ(engine_.next_report().outcome, relay_outcome::answered);
  }
  connection.request("GET", "/v2/health/live");
  EXPECT_EQ(connection.read_response().status, 200);
}

TEST_P(relayed, a_body_passes_as_it_comes_while_the_answer_does) {
  auto connection = client();
  connection.send(
      "POST /e/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_EQ(side.read_until("abc\r\n"), "3\r\nabc\r\n");
  EXPECT_TRUE(side.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"));
  connection.send("1\r\nd\r\n0\r\nX-Sum: 4\r\n\r\n");
  EXPECT_EQ(side.read_until("\r\n\r\n"), "1\r\nd\r\n0\r\nX-Sum: 4\r\n\r\n");
  EXPECT_TRUE(side.say("0\r\n\r\n"));
  EXPECT_EQ(connection.read_response().headers.at("Transfer-Encoding"), "chunked");
  EXPECT_EQ(connection.read_until("\r\n0\r\n\r\n"), "2\r\nhi\r\n0\r\n\r\n");
}

TEST_P(relayed, a_client_that_leaves_ends_the_engines_connection) {
  engine_side side{unique_fd{}};
  {
    auto connection = client();
    connection.send(get);
    side = engine_.accept();
    (void)side.read_head();
  }
  EXPECT_TRUE(side.sees_the_end());
  EXPECT_EQ(engine_.next_report().outcome, relay_outcome::client_left);
}

TEST_P(relayed, a_client_that_leaves_while_it_waits_waits_no_longer) {
  engine_.holds_back = true;
  {
    auto connection = client();
    connection.send(get);
    engine_.await_waiting();
  }
  EXPECT_EQ(engine_.next_report().outcome, relay_outcome::client_left);
}

TEST_P(relayed, a_request_that_waits_goes_when_it_is_admitted_or_hears_why_not) {
  engine_.holds_back = true;
  auto connection = client();
  connection.send(get);
  engine_.admit(error{error_kind::unavailable, "no engine today", 2500ms});
  auto const answer = connection.read_response();
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(error_in(answer), "no engine today");
  connection.request("GET", "/v2/health/live");  // the connection goes on
  EXPECT_EQ(connection.read_response().status, 200);
}

TEST_P(relayed, an_engine_that_leaves_before_it_answers_is_answered_for) {
  auto connection = client();
  connection.send(get);
  {
    auto side = engine_.accept();
    (void)side.read_head();
    EXPECT_TRUE(side.say("HTTP/1.1 200 O"));
  }
  EXPECT_EQ(connection.read_response().status, 503);
  auto const report = engine_.next_report();
  EXPECT_EQ(report.outcome, relay_outcome::failed);
  EXPECT_TRUE(report.engine_has_left);
}

TEST_P(relayed, an_engine_that_leaves_within_its_answer_cuts_the_clients_connection) {
  auto connection = client();
  connection.send(get);
  {
    auto side = engine_.accept();
    (void)side.read_head();
    EXPECT_TRUE(side.say("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"));
  }
  EXPECT_THROW((void)connection.read_response(), std::runtime_error);
  EXPECT_EQ(engine_.next_report().outcome, relay_outcome::failed);
}

TEST_P(relayed, what_is_silent_for_too_long_is_given_up) {
  engine_.limits.until_answer = 1s;
  auto connection = client();
  connection.send(get);
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_EQ(connection.read_response().status, 504);
  EXPECT_TRUE(side.sees_the_end());
  EXPECT_EQ(engine_.next_report().outcome, relay_outcome::failed);
}

TEST_P(relayed, an_engine_that_says_more_than_its_answer_is_not_read_further) {
  auto connection = client();
  connection.send(get);
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_TRUE(
      side.say("HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"));
  EXPECT_EQ(connection.read_response().status, 204);
  connection.request("GET", "/v2/health/live");
  EXPECT_EQ(connection.read_response().status, 200);
}

TEST_P(relayed, a_server_that_stops_finishes_what_passes) {
  auto const idle = [this] {
    auto made = client();
    made.request("GET", "/v2/health/live");
    EXPECT_EQ(made.read_response().status, 200);
    return made;
  };
  auto before = idle();
  auto connection = client();
  connection.send(get);
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_TRUE(side.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"));
  auto after = idle();
  auto stopped = std::async(std::launch::async, [&] { endpoint_->stop(long_time); });
  // Connections without a request are closed by a stop: it has begun, and is not over.
  EXPECT_TRUE(before.ended());
  EXPECT_TRUE(after.ended());
  EXPECT_NE(stopped.wait_for(0s), std::future_status::ready);
  EXPECT_TRUE(side.say("0\r\n\r\n"));
  EXPECT_EQ(connection.read_response().status, 200);
  EXPECT_EQ(connection.read_until("\r\n0\r\n\r\n"), "2\r\nhi\r\n0\r\n\r\n");
  stopped.get();
}

}  // namespace
}  // namespace sluice::server
