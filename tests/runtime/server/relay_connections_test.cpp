/// Connections to an engine that serve one request after the other, and engines that do with them what they like.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/runtime/server/relay_fixture.hpp"

namespace sluice::server {
namespace {

constexpr std::string_view a_get = "GET /e/x HTTP/1.1\r\nHost: h\r\n\r\n";
constexpr std::string_view a_post =
    "POST /e/x HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody";
constexpr std::string_view says_hi = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";

enum class over { port, unix_socket };

class kept_connection : public endpoint_test, public testing::WithParamInterface<over> {
 protected:
  kept_connection() : endpoint_test(transport::plain) {
    options_.engines = &engine_;
    engine_.limits.keeps_connections = true;
    if (GetParam() == over::unix_socket) engine_.listen_on_unix_socket();
  }
  ~kept_connection() override {
    endpoint_.reset();  // before the engine
    EXPECT_FALSE(engine_.has_sent_back());
  }
  kept_connection(kept_connection const&) = delete;
  kept_connection& operator=(kept_connection const&) = delete;
  kept_connection(kept_connection&&) = delete;
  kept_connection& operator=(kept_connection&&) = delete;

  /// The engine answers, and the client has that.
  void answer(engine_side& side, http_client& asks) {
    EXPECT_TRUE(side.say(says_hi));
    EXPECT_EQ(asks.read_response().body, "hi");
    EXPECT_EQ(engine_.next_report().outcome, relay_outcome::answered);
  }
  /// The engine answers `request` on a new connection, which is kept.
  engine_side after_one_request(http_client& asks, std::string_view request = a_get) {
    asks.send(request);
    auto side = engine_.accept();
    (void)side.read_head();
    if (request == a_post) (void)side.read(4);
    answer(side, asks);
    EXPECT_EQ(engine_.kept(), 1U);
    return side;
  }
  /// The engine answers a request on that connection, as if nothing had been.
  void answers_on(engine_side& side, http_client& asks, std::string_view request = a_get) {
    asks.send(request);
    EXPECT_TRUE(side.read_head().starts_with(request.substr(0, 13)));
    if (request == a_post) {
      EXPECT_EQ(side.read(4), "body");
    }
    answer(side, asks);
  }
  /// What the engine answers on a new connection, after which it is not kept.
  void is_not_kept_after(std::string_view request, std::string_view answer,
                         std::string_view body_behind = {}) {
    auto asks = client();
    asks.send(request);
    auto side = engine_.accept();
    (void)side.read_head();
    if (!body_behind.empty()) {
      EXPECT_EQ(side.read(body_behind.size()), body_behind);
    }
    EXPECT_TRUE(side.say(answer));
    EXPECT_EQ(engine_.next_report().outcome, relay_outcome::answered) << answer;
    EXPECT_EQ(engine_.kept(), 0U) << answer;
    EXPECT_TRUE(side.sees_the_end());
  }

  one_engine engine_;
};

INSTANTIATE_TEST_SUITE_P(on, kept_connection, testing::Values(over::port, over::unix_socket));

TEST_P(kept_connection, serves_requests_of_several_clients_one_after_the_other) {
  auto first = client();
  auto side = after_one_request(first, a_post);
  answers_on(side, first, a_post);
  auto second = client();
  answers_on(side, second);
  answers_on(side, first, a_post);
  EXPECT_EQ(engine_.kept(), 1U);
}

TEST_P(kept_connection, is_not_asked_to_end_and_says_nothing_of_itself) {
  auto asks = client();
  asks.send(a_get);
  auto side = engine_.accept();
  EXPECT_EQ(side.read_head().find("Connection:"), std::string::npos);
}

TEST_P(kept_connection, serves_on_after_a_body_in_chunks_with_fields_behind_it) {
  auto asks = client();
  asks.send(a_get);
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_TRUE(side.say(
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX-Sum: 9\r\n\r\n"));
  (void)asks.read_response();
  EXPECT_EQ(asks.read_until("9\r\n\r\n"), "2\r\nhi\r\n0\r\nX-Sum: 9\r\n\r\n");
  EXPECT_EQ(engine_.next_report().outcome, relay_outcome::answered);
  answers_on(side, asks, a_post);
}

TEST_P(kept_connection, becomes_a_websocket_and_then_serves_nobody_else) {
  auto asks = client();
  auto side = after_one_request(asks);
  asks.send("GET /e/x HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
  EXPECT_NE(side.read_head().find("Connection: Upgrade\r\n"), std::string::npos);
  EXPECT_TRUE(side.say(
      "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nab"));
  EXPECT_NE(asks.read_until("ab").find("101 Switching"), std::string::npos);
  asks.send("cd");
  EXPECT_EQ(side.read(2), "cd");
  side.leave();
  EXPECT_EQ(engine_.next_report().outcome, relay_outcome::answered);
  EXPECT_EQ(engine_.kept(), 0U);
}

TEST_P(kept_connection, is_none_where_the_answer_says_so_or_does_not_say_where_it_ends) {
  is_not_kept_after(a_get, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi");
  is_not_kept_after(a_get, "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi");
  auto asks = client();
  asks.send(a_get);
  {
    auto side = engine_.accept();
    (void)side.read_head();
    EXPECT_TRUE(side.say("HTTP/1.1 200 OK\r\n\r\nto the end"));
  }
  EXPECT_EQ(engine_.next_report().outcome, relay_outcome::answered);
  EXPECT_EQ(engine_.kept(), 0U);
}

TEST_P(kept_connection, is_none_where_the_next_answer_could_be_taken_for_another_s) {
  // More than the answer, and answers behind which careless servers say more.
  is_not_kept_after(a_get, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi there");
  is_not_kept_after("HEAD /e/x HTTP/1.1\r\nHost: h\r\n\r\n",
                    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n");
  is_not_kept_after(a_get, "HTTP/1.1 204 No Content\r\n\r\n");
  is_not_kept_after(a_get, "HTTP/1.1 304 Not Modified\r\n\r\n");
}

TEST_P(kept_connection, is_none_where_a_body_could_be_taken_for_the_next_request) {
  // Of a method that has none, and of a request that has been refused, perhaps unread.
  is_not_kept_after("GET /e/x HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody", says_hi,
                    "body");
  is_not_kept_after(a_post, "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", "body");
}

TEST_P(kept_connection, is_none_where_the_answer_comes_before_the_request_is_whole) {
  auto asks = client();
  asks.send("POST /e/x HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbo");
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_TRUE(side.say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nh"));
  asks.read_until("\r\n\r\nh");
  asks.send("dy");
  EXPECT_EQ(side.read(4), "body");
  EXPECT_TRUE(side.say("i"));
  EXPECT_EQ(engine_.next_report().outcome, relay_outcome::answered);
  EXPECT_EQ(engine_.kept(), 0U);
}

TEST_P(kept_connection, whose_client_leaves_is_closed_so_that_the_engine_knows) {
  auto asks = client();
  auto side = after_one_request(asks);
  {
    auto leaves = client();
    leaves.send(a_get);
    (void)side.read_head();
  }
  EXPECT_TRUE(side.sees_the_end());
  EXPECT_EQ(engine_.next_report().outcome, relay_outcome::client_left);
  EXPECT_EQ(engine_.kept(), 0U);
}

// ---- the engine closes it while a request is on its way: the gateway of these tests gives it out all the same

TEST_P(kept_connection, closed_before_anything_came_is_replaced_for_every_request) {
  for (auto const request : {a_get, a_post}) {
    auto asks = client();
    after_one_request(asks).leave();
    asks.send(request);
    auto side = engine_.accept();
    EXPECT_TRUE(side.read_head().starts_with(request.substr(0, 13)));
    if (request == a_post) {
      EXPECT_EQ(side.read(4), "body");
    }
    EXPECT_TRUE(side.say("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi"));
    EXPECT_EQ(asks.read_response().body, "hi");
    auto const report = engine_.next_report();
    EXPECT_EQ(report.outcome, relay_outcome::answered);
    EXPECT_FALSE(report.engine_has_left);
  }
}

TEST_P(kept_connection, closed_before_the_body_has_come_is_replaced_and_the_body_goes_on) {
  auto asks = client();
  after_one_request(asks).leave();
  asks.send("POST /e/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nbo\r\n");
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_EQ(side.read_until("bo\r\n"), "2\r\nbo\r\n");
  asks.send("2\r\ndy\r\n0\r\n\r\n");
  EXPECT_EQ(side.read_until("0\r\n\r\n"), "2\r\ndy\r\n0\r\n\r\n");
  answer(side, asks);
}

TEST_P(kept_connection, closed_with_the_request_is_replaced_for_what_may_be_repeated_alone) {
  auto asks = client();
  auto side = after_one_request(asks);
  asks.send(a_get);
  (void)side.read_head();
  side.leave();
  side = engine_.accept();
  EXPECT_TRUE(side.read_head().starts_with("GET /e/x "));
  answer(side, asks);

  asks.send(a_post);
  (void)side.read_head();
  EXPECT_EQ(side.read(4), "body");
  side.leave();
  EXPECT_EQ(asks.read_response().status, 503);
  auto const report = engine_.next_report();
  EXPECT_EQ(report.outcome, relay_outcome::failed);
  EXPECT_TRUE(report.engine_has_left);
}

TEST_P(kept_connection, closed_without_the_request_being_read_is_not_trusted_to_have_not_been) {
  auto asks = client();
  auto side = after_one_request(asks);
  asks.send(a_post);
  EXPECT_EQ(side.read(1), "P");  // so that it has come
  side.leave();                  // which resets the connection
  EXPECT_EQ(asks.read_response().status, 503);
  EXPECT_TRUE(engine_.next_report().engine_has_left);
}

TEST_P(kept_connection, closed_after_a_part_of_an_answer_is_not_replaced) {
  auto asks = client();
  auto side = after_one_request(asks);
  asks.send(a_get);
  (void)side.read_head();
  EXPECT_TRUE(side.say("HTTP/1.1 2"));
  side.leave();
  EXPECT_EQ(asks.read_response().status, 503);
  EXPECT_TRUE(engine_.next_report().engine_has_left);
}

TEST_P(kept_connection, is_replaced_once) {
  auto asks = client();
  auto side = after_one_request(asks);
  asks.send(a_get);
  for (int i = 0; i < 2; ++i) {
    (void)side.read_head();
    side.leave();
    if (i == 0) side = engine_.accept();
  }
  EXPECT_EQ(asks.read_response().status, 503);
  EXPECT_TRUE(engine_.next_report().engine_has_left);
}

TEST_P(kept_connection, that_says_408_to_nobody_is_replaced) {
  auto asks = client();
  auto side = after_one_request(asks);
  EXPECT_TRUE(
      side.say("HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"));
  side.leave();
  asks.send(a_get);
  side = engine_.accept();
  (void)side.read_head();
  answer(side, asks);
}

TEST_P(kept_connection, of_an_engine_that_has_gone_has_what_did_not_come_wait_for_the_next_one) {
  auto asks = client();
  after_one_request(asks).leave();
  engine_.stop_listening();
  asks.send(a_post);
  engine_.await_sent_back();
  one_engine next;
  engine_.admit(next.address());
  auto side = next.accept();
  (void)side.read_head();
  EXPECT_EQ(side.read(4), "body");
  answer(side, asks);
}

TEST_P(kept_connection, of_an_engine_that_a_request_has_ended_has_that_one_not_sent_to_the_next) {
  auto asks = client();
  auto side = after_one_request(asks);
  engine_.stop_listening();
  asks.send(a_get);
  (void)side.read_head();
  side.leave();
  EXPECT_EQ(asks.read_response().status, 503);
  EXPECT_TRUE(engine_.next_report().engine_has_left);
}

TEST_P(kept_connection, does_not_have_a_large_body_kept_for_its_sake) {
  auto asks = client();
  auto side = after_one_request(asks);
  std::string const body(200'000, 'x');
  asks.send("PUT /e/x HTTP/1.1\r\nHost: h\r\nContent-Length: 200000\r\n\r\n" + body);
  (void)side.read_head();
  EXPECT_EQ(side.read(body.size()), body);
  side.leave();
  EXPECT_EQ(asks.read_response().status, 503);
  EXPECT_TRUE(engine_.next_report().engine_has_left);
}

}  // namespace
}  // namespace sluice::server
