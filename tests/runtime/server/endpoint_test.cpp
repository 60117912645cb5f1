#include "runtime/server/http/endpoint.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/runtime/server/endpoint_fixture.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string kind_request(int kind) {
  return json{
      {"inputs", {{{"name", "kind"}, {"datatype", "INT32"}, {"shape", {1}}, {"data", {kind}}}}}}
      .dump();
}

TEST_P(http_endpoint, answers_an_infer_request) {
  auto const response = once("POST", "/v2/models/add/infer", addition(1.5F, 2));
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.headers.at("Content-Type"), "application/json");
  EXPECT_EQ(response.headers.count("Date"), 1U);
  EXPECT_EQ(sum_in(response), 3.5F);
  EXPECT_EQ(json::parse(response.body)["id"], "r");
  EXPECT_EQ(json::parse(response.body)["model_name"], "add");
}

TEST_P(http_endpoint, tells_the_port_that_it_is_bound_to) {
  static_cast<void>(client());
  EXPECT_NE(endpoint_->port(), 0);
  EXPECT_EQ(endpoint_->address(), fmt::format("127.0.0.1:{}", endpoint_->port()));
}

TEST_P(http_endpoint, one_connection_carries_many_requests) {
  auto connection = client();
  for (int i = 0; i < 50; ++i) {
    connection.request("POST", "/v2/models/add/infer", addition(static_cast<float>(i), 1));
    EXPECT_EQ(sum_in(connection.read_response()), static_cast<float>(i + 1));
    connection.request("GET", "/v2/models/none");
    EXPECT_EQ(connection.read_response().status, 404);  // an error does not end it
  }
}

TEST_P(http_endpoint, requests_sent_ahead_are_answered_in_order) {
  auto connection = client();
  std::string text;
  for (int i = 0; i < 20; ++i) {
    auto const body = addition(static_cast<float>(i), 0);
    text +=
        fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{}",
                    body.size(), body);
    text += "GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n";
  }
  connection.send(text);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(sum_in(connection.read_response()), static_cast<float>(i));
    EXPECT_EQ(connection.read_response().body, R"({"live":true})");
  }
}

TEST_P(http_endpoint, many_clients_at_once_get_their_own_answers) {
  options_.threads = 4;
  auto first = client();
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      std::vector<http_client> connections;
      for (int c = 0; c < 8; ++c) connections.emplace_back(endpoint_->port(), over_);
      for (int round = 0; round < 10; ++round) {
        for (int c = 0; c < 8; ++c) {
          connections[static_cast<std::size_t>(c)].request(
              "POST", "/v2/models/add/infer",
              addition(static_cast<float>(t * 100 + c), static_cast<float>(round)));
        }
        for (int c = 0; c < 8; ++c) {
          if (sum_in(connections[static_cast<std::size_t>(c)].read_response()) ==
              static_cast<float>(t * 100 + c + round)) {
            ++right;
          }
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, 16 * 8 * 10);
}

TEST_P(http_endpoint, a_request_may_come_byte_by_byte) {
  auto connection = client();
  auto const body = addition(1, 2);
  auto const text =
      fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{}",
                  body.size(), body);
  for (char const c : text) connection.send({&c, 1});
  EXPECT_EQ(sum_in(connection.read_response()), 3.0F);
}

TEST_P(http_endpoint, a_chunked_request_is_understood) {
  auto connection = client();
  auto const body = addition(1, 2);
  connection.send(
      "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
  connection.send(fmt::format("{:x}\r\n{}\r\n", 10, body.substr(0, 10)));
  connection.send(fmt::format("{:x}\r\n{}\r\n0\r\n\r\n", body.size() - 10, body.substr(10)));
  EXPECT_EQ(sum_in(connection.read_response()), 3.0F);
}

TEST_P(http_endpoint, a_chunked_request_may_come_byte_by_byte) {
  auto connection = client();
  auto const body = addition(1, 2);
  auto const text = fmt::format(
      "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
      "{:x}\r\n{}\r\n0\r\n\r\n",
      body.size(), body);
  for (char const c : text) connection.send({&c, 1});
  EXPECT_EQ(sum_in(connection.read_response()), 3.0F);
}

TEST_P(http_endpoint, head_is_get_without_the_body) {
  auto connection = client();
  connection.request("GET", "/v2/models/add");
  auto const whole = connection.read_response();
  connection.request("HEAD", "/v2/models/add");
  auto const head = connection.read_response(false);
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.headers.at("Content-Length"), std::to_string(whole.body.size()));
  connection.request("HEAD", "/v2/models/none");
  EXPECT_EQ(connection.read_response(false).status, 404);
  connection.request("GET", "/v2/health/live");  // would see a stray body
  EXPECT_EQ(connection.read_response().body, R"({"live":true})");
}

TEST_P(http_endpoint, connections_end_when_the_client_wants) {
  auto connection = client();
  connection.request("GET", "/v2", {}, "Connection: close\r\n");
  EXPECT_EQ(connection.read_response().headers.at("Connection"), "close");
  EXPECT_TRUE(connection.ended());
}

TEST_P(http_endpoint, http_1_0_is_spoken_too) {
  auto connection = client();
  connection.send("GET /v2/health/live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  EXPECT_EQ(connection.read_response().headers.at("Connection"), "keep-alive");
  connection.send("GET /v2/health/live HTTP/1.0\r\n\r\n");
  EXPECT_EQ(connection.read_response().status, 200);
  EXPECT_TRUE(connection.ended());
}

TEST_P(http_endpoint, a_client_that_asks_first_is_invited) {
  auto connection = client();
  auto const body = addition(2, 2);
  connection.send(
      fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n"
                  "Content-Length: {}\r\n\r\n",
                  body.size()));
  EXPECT_EQ(connection.read_until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  connection.send(body);
  EXPECT_EQ(sum_in(connection.read_response()), 4.0F);
  connection.request("GET", "/v2/health/live");
  EXPECT_EQ(connection.read_response().status, 200);
}

TEST_P(http_endpoint, a_client_that_asks_first_is_refused_before_it_sends) {
  struct row {
    std::string target;
    std::string headers;
    int status;
  };
  options_.max_body_bytes = 1000;
  for (auto const& each :
       {row{"/v2/models/none/infer", "Expect: 100-continue\r\nContent-Length: 500\r\n", 404},
        row{"/v2", "Expect: 100-continue\r\nContent-Length: 500\r\n", 405},
        row{"/v2/models/add/infer", "Expect: 100-continue\r\nContent-Length: 1001\r\n", 413},
        row{"/v2/models/add/infer", "Expect: 200-ok\r\nContent-Length: 5\r\n", 417}}) {
    auto connection = client();
    connection.send(
        fmt::format("POST {} HTTP/1.1\r\nHost: h\r\n{}\r\n", each.target, each.headers));
    auto const response = connection.read_response();
    EXPECT_EQ(response.status, each.status) << each.target << each.headers;
    EXPECT_FALSE(error_in(response).empty());
    EXPECT_TRUE(connection.ended());
  }
}

TEST_P(http_endpoint, a_body_over_the_limit_is_413_and_at_the_limit_is_read) {
  auto body = addition(1, 1);
  options_.max_body_bytes = body.size();
  EXPECT_EQ(once("POST", "/v2/models/add/infer", body).status, 200);
  body += ' ';
  auto const response = once("POST", "/v2/models/add/infer", body);
  EXPECT_EQ(response.status, 413);
  EXPECT_THAT(error_in(response), HasSubstr(fmt::format("{} bytes", options_.max_body_bytes)));

  auto chunked = client();
  chunked.send(
      "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
  chunked.send(fmt::format("{:x}\r\n{}\r\n", body.size(), body));
  EXPECT_EQ(chunked.read_response().status, 413);
}

// The answer must reach a client that is still sending: a plain close would reset the connection
// under it.
TEST_P(http_endpoint, the_refusal_of_a_large_body_reaches_the_client) {
  options_.max_body_bytes = 1000;
  auto connection = client();
  std::string const body(4'000'000, ' ');
  connection.request("POST", "/v2/models/add/infer", body);
  auto const response = connection.read_response();
  EXPECT_EQ(response.status, 413);
  connection.finish_sending();
  EXPECT_TRUE(connection.ended());
}

TEST_P(http_endpoint, a_claimed_length_does_not_cost_memory_or_an_answer) {
  auto connection = client();
  connection.send(
      "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: "
      "18446744073709551615\r\n\r\n");
  EXPECT_EQ(connection.read_response().status, 413);
}

TEST_P(http_endpoint, a_header_over_the_limit_is_431) {
  options_.max_header_bytes = 1000;
  auto const response = once("GET", "/v2", {}, "X: " + std::string(2000, 'x') + "\r\n");
  EXPECT_EQ(response.status, 431);
  EXPECT_THAT(error_in(response), HasSubstr("1000 bytes"));
}

TEST_P(http_endpoint, what_is_not_http_is_400_in_json) {
  for (std::string const text :
       {"rubbish\r\n\r\n", "GET /v2\r\n\r\n", "GET /v2 HTTP/2.0\r\n\r\n",
        "GET /v2 HTTP/1.1\r\nno colon\r\n\r\n",
        "GET /v2 HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n",
        "POST /v2 HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "POST /v2 HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST /v2 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "GET /v2 HTTP/1.1\r\n\r\n", "GET /v2 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "\x16\x03\x01 TLS\r\n\r\n"}) {
    auto connection = client();
    connection.send(text);
    auto const response = connection.read_response();
    EXPECT_EQ(response.status, 400) << text;
    EXPECT_FALSE(error_in(response).empty()) << text;
    EXPECT_TRUE(connection.ended()) << text;
  }
}

TEST_P(http_endpoint, unknown_transfer_encodings_are_501_and_end_the_connection) {
  for (auto const* const coding : {"gzip", "gzip, chunked", "identity"}) {
    auto connection = client();
    connection.request("POST", "/v2/models/add/infer", {},
                       fmt::format("Transfer-Encoding: {}\r\nX: ", coding));
    EXPECT_THAT(connection.read_response().status, testing::AnyOf(501, 400)) << coding;
    EXPECT_TRUE(connection.ended()) << coding;
  }
}

TEST_P(http_endpoint, headers_of_replies_follow_their_status) {
  auto const wrong_verb = once("DELETE", "/v2/models/add/infer");
  EXPECT_EQ(wrong_verb.status, 405);
  EXPECT_EQ(wrong_verb.headers.at("Allow"), "POST");
  auto const cold = once("GET", "/v2/models/cold/ready");
  EXPECT_EQ(cold.status, 503);
  EXPECT_EQ(cold.headers.count("Retry-After"), 1U);
  auto const unknown = once("POST", "/v2/models/add/infer", "{}", "Content-Encoding: br\r\n");
  EXPECT_EQ(unknown.status, 415);
  EXPECT_EQ(unknown.headers.at("Accept-Encoding"), "gzip, deflate");
  EXPECT_EQ(
      once("POST", "/v2/models/add/infer", "{}", "Inference-Header-Content-Length: 3\r\n").status,
      400);
  EXPECT_EQ(once("GET", "/v2/models/%zz").status, 400);
  EXPECT_EQ(once("POST", "/v2/models/a%2Fb%20%C3%A9/infer", addition(1, 1)).status, 200);
}

TEST_P(http_endpoint, errors_of_the_service_become_statuses) {
  auto const fails_with = [&](error_kind kind) {
    return once("POST", "/v2/models/fails/infer", kind_request(static_cast<int>(kind)));
  };
  EXPECT_EQ(fails_with(error_kind::invalid_argument).status, 400);
  EXPECT_EQ(fails_with(error_kind::not_found).status, 404);
  EXPECT_EQ(fails_with(error_kind::unsupported).status, 501);
  EXPECT_EQ(fails_with(error_kind::deadline_exceeded).status, 504);
  auto const unavailable = fails_with(error_kind::unavailable);
  EXPECT_EQ(unavailable.status, 503);
  EXPECT_EQ(unavailable.headers.count("Retry-After"), 1U);
  EXPECT_EQ(error_in(unavailable), "secret of the service");
  auto const bug = fails_with(error_kind::internal);
  EXPECT_EQ(bug.status, 500);
  EXPECT_THAT(bug.body, testing::Not(HasSubstr("secret")));
}

TEST_P(http_endpoint, a_service_that_misbehaves_leaves_no_client_waiting) {
  EXPECT_EQ(once("POST", "/v2/models/throws/infer", kind_request(0)).status, 503);
  EXPECT_EQ(once("POST", "/v2/models/drops/infer", kind_request(0)).status, 500);
  EXPECT_EQ(once("POST", "/v2/models/inline/infer", kind_request(0)).status, 200);
  auto connection = client();
  for (int i = 0; i < 20; ++i) {
    connection.request("POST", "/v2/models/twice/infer", kind_request(0));
    EXPECT_EQ(connection.read_response().status, 200);
    connection.request("POST", "/v2/models/add/infer", addition(1, 1));
    EXPECT_EQ(sum_in(connection.read_response()), 2.0F);  // not the second answer of "twice"
  }
}

TEST_P(http_endpoint, health_answers_while_requests_wait) {
  service_.hold();
  std::vector<http_client> waiting;
  for (int i = 0; i < 10; ++i) {
    waiting.push_back(client());
    waiting.back().request("POST", "/v2/models/add/infer", addition(1, 1));
  }
  service_.await_requests(10);
  EXPECT_EQ(once("GET", "/v2/health/live").status, 200);
  service_.release();
  for (auto& connection : waiting) EXPECT_EQ(sum_in(connection.read_response()), 2.0F);
}

TEST_P(http_endpoint, clients_that_leave_break_nothing) {
  service_.hold();
  for (int i = 0; i < 10; ++i) {
    auto connection = client();
    connection.request("POST", "/v2/models/add/infer", addition(1, 1));
    service_.await_requests(static_cast<std::size_t>(i) + 1);
    connection.vanish();
  }
  for (auto const* const part :
       {"", "GET /v2",
        "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{"}) {
    auto connection = client();
    connection.send(part);
    connection.vanish();
    auto polite = client();
    polite.send(part);
    polite.finish_sending();
    EXPECT_TRUE(polite.ended()) << part;
  }
  service_.release();
  service_.await_answers(10);
  EXPECT_EQ(once("GET", "/v2/health/live").status, 200);
  await_connections(0);
}

TEST_P(http_endpoint, a_client_that_sends_and_half_closes_gets_its_answer) {
  options_.idle_timeout = 10min;  // what ends it is not that nothing more comes
  auto connection = client();
  connection.request("POST", "/v2/models/add/infer", addition(1, 2));
  connection.finish_sending();
  EXPECT_EQ(sum_in(connection.read_final_response()), 3.0F);
  EXPECT_TRUE(connection.ended());
}

TEST_P(http_endpoint, the_request_of_a_client_that_leaves_is_cancelled) {
  service_.hold();
  auto leaving = client();
  auto vanishing = client();
  auto staying = client();
  std::size_t sent = 0;
  for (auto* const each : {&leaving, &vanishing, &staying}) {
    each->request("POST", "/v2/models/add/infer", addition(1, 2));
    service_.await_requests(++sent);
  }
  leaving.leave();
  EXPECT_THAT(service_.await_cancelled(1), ElementsAre(1U));
  vanishing.vanish();
  EXPECT_THAT(service_.await_cancelled(2), ElementsAre(1U, 2U));
  await_connections(1);
  service_.release();
  EXPECT_EQ(sum_in(staying.read_response()), 3.0F);
  EXPECT_EQ(once("GET", "/v2/health/live").status, 200);
  EXPECT_THAT(service_.await_cancelled(2), ElementsAre(1U, 2U));
}

TEST_P(http_endpoint, a_client_that_half_closes_while_it_waits_is_still_there) {
  service_.hold();
  auto connection = client();
  connection.request("POST", "/v2/models/add/infer", addition(1, 2));
  service_.await_requests(1);
  connection.finish_sending();
  EXPECT_EQ(connection.read_response().status, 100);  // to see whether somebody takes it
  service_.release();
  EXPECT_EQ(sum_in(connection.read_response()), 3.0F);
  EXPECT_TRUE(connection.ended());
  EXPECT_THAT(service_.await_cancelled(0), IsEmpty());
}

TEST_P(http_endpoint, a_client_of_http_1_0_that_half_closes_gets_no_interim_answer) {
  service_.hold();
  auto connection = client();
  auto const body = addition(1, 2);
  connection.send("POST /v2/models/add/infer HTTP/1.0\r\nContent-Length: " +
                  std::to_string(body.size()) + "\r\n\r\n" + body);
  service_.await_requests(1);
  connection.finish_sending();
  service_.release();
  EXPECT_EQ(sum_in(connection.read_response()), 3.0F);
}

TEST_P(http_endpoint, requests_sent_while_another_waits_are_answered_in_order) {
  service_.hold();
  auto connection = client();
  connection.request("POST", "/v2/models/add/infer", addition(1, 2));
  service_.await_requests(1);
  auto const body = addition(3, 4);
  auto const text = "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: " +
                    std::to_string(body.size()) + "\r\n\r\n" + body;
  for (char const& byte : text) {
    connection.send({&byte, 1});
  }
  connection.request("GET", "/v2/health/live");
  service_.release();
  EXPECT_EQ(sum_in(connection.read_response()), 3.0F);
  EXPECT_EQ(sum_in(connection.read_response()), 7.0F);
  EXPECT_EQ(connection.read_response().status, 200);
}

TEST_P(http_endpoint, a_large_body_keeps_nobody_else_waiting) {
  options_.threads = 1;
  options_.body_threads = 1;
  service_.hold_lookups_of("cold");  // what is asked while a body is read
  auto const body = large_addition();
  auto large = client();
  large.request("POST", "/v2/models/cold/infer", body);
  auto another = client();
  another.request("POST", "/v2/models/cold/infer", body);
  EXPECT_EQ(once("GET", "/v2/health/live").status, 200);
  EXPECT_EQ(sum_in(once("POST", "/v2/models/add/infer", addition(1, 1))), 2.0F);
  service_.hold_lookups_of("");
  EXPECT_EQ(sum_in(large.read_response()), 3.0F);
  EXPECT_EQ(sum_in(another.read_response()), 3.0F);
}

TEST_P(http_endpoint, a_large_body_may_come_in_pieces_of_any_size) {
  auto body = addition(1, 2);
  body.resize(3 << 20U, ' ');
  auto const small = addition(2, 2);
  auto connection = client();
  for (int round = 0; round < 2; ++round) {
    connection.send(
        fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n",
                    body.size()));
    std::size_t sent = 0;
    for (std::size_t const each : {1U, 100U << 10U, 1U << 20U, 5U, 300U << 10U}) {
      connection.send(std::string_view{body}.substr(sent, each));
      sent += each;
      EXPECT_EQ(once("GET", "/v2/health/live").status, 200);  // and it has time to be read
    }
    connection.send(std::string_view{body}.substr(sent, body.size() - sent - 1));
    connection.send(" POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\n"  // sent ahead
                    + fmt::format("Content-Length: {}\r\n\r\n", small.size()) + small);
    EXPECT_EQ(sum_in(connection.read_response()), 3.0F);
    EXPECT_EQ(sum_in(connection.read_response()), 4.0F);
  }
}

TEST_P(http_endpoint, a_large_body_in_many_chunks_is_understood) {
  auto body = addition(1, 2);
  body.resize(1 << 20U, ' ');
  std::string text =
      "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (std::size_t sent = 0, each = 1; sent < body.size(); sent += each, each = 3 * each + 1) {
    auto const chunk = std::string_view{body}.substr(sent, each);
    text += fmt::format("{:x}\r\n{}\r\n", chunk.size(), chunk);
  }
  auto connection = client();
  for (int round = 0; round < 2; ++round) {
    connection.send(text);
    connection.send("0\r\n\r\n");
    EXPECT_EQ(sum_in(connection.read_response()), 3.0F);
  }
}

TEST_P(http_endpoint, a_large_body_that_stalls_is_408) {
  options_.transfer_timeout = 200ms;
  for (auto const* const head :
       {"Content-Length: 3000000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n30d40\r\n"}) {
    auto connection = client();
    connection.send(fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\n{}{}", head,
                                std::string(150'000, ' ')));
    EXPECT_EQ(connection.read_response().status, 408) << head;
    EXPECT_TRUE(connection.ended());
  }
}

TEST_P(http_endpoint, a_large_body_that_nobody_has_time_for_is_408_and_breaks_nothing) {
  options_.transfer_timeout = 3s;
  auto const body = large_addition();
  auto first = keep_others_bodies_waiting(body);
  auto second = client(), leaves = client();
  (void)second.try_send(
      fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{}",
                  body.size(), body.substr(0, 100'000)));
  (void)leaves.try_send(
      fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{}",
                  body.size(), body.substr(0, 100'000)));
  leaves.leave();
  service_.hold_lookups_of("");
  EXPECT_EQ(second.read_response().status, 408);
  EXPECT_EQ(sum_in(first.read_response()), 3.0F);
  await_connections(1);
}

TEST_P(http_endpoint, a_large_body_whose_time_is_over_before_anybody_has_read_of_it_is_408) {
  options_.transfer_timeout = 3s;
  auto const body = large_addition();
  auto first = keep_others_bodies_waiting(body);
  std::string const head = "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: ";
  auto large = client(), small = client();
  large.send(fmt::format("{}{}\r\n\r\n{}", head, body.size(), body.substr(0, 20'000)));
  small.send(head + "100\r\n\r\n{");  // later, and read at once
  EXPECT_EQ(small.read_response().status, 408);
  service_.hold_lookups_of("");
  EXPECT_EQ(large.read_response().status, 408);
  EXPECT_EQ(sum_in(first.read_response()), 3.0F);
}

TEST_P(http_endpoint, a_client_that_leaves_within_a_large_body_is_missed) {
  for (bool const finishes_sending : {false, true}) {
    auto leaves = client();
    leaves.send("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 3000000\r\n\r\n");
    leaves.send(std::string(1'500'000, ' '));
    if (finishes_sending) leaves.finish_sending();
    leaves.leave();
    await_connections(0);
  }
}

TEST_P(http_endpoint, stop_cuts_a_large_body_that_waits_to_be_read) {
  auto const body = large_addition();
  auto first = keep_others_bodies_waiting(body);
  auto second = client();
  second.request("POST", "/v2/models/add/infer", body);
  auto stopping = std::async(std::launch::async, [&] { endpoint_->stop(0ms); });
  EXPECT_TRUE(second.ended());
  service_.hold_lookups_of("");
  stopping.get();
}

TEST_P(http_endpoint, large_bodies_that_wait_have_a_bound) {
  options_.max_waiting_body_bytes = 100 << 10U;
  auto const body = large_addition();
  auto large = keep_others_bodies_waiting(body);
  auto const response = once("POST", "/v2/models/add/infer", body);
  EXPECT_EQ(response.status, 503);
  EXPECT_EQ(response.headers.count("Retry-After"), 1U);
  EXPECT_THAT(error_in(response), HasSubstr("large bodies"));
  EXPECT_EQ(sum_in(once("POST", "/v2/models/add/infer", addition(1, 1))), 2.0F);
  service_.hold_lookups_of("");
  EXPECT_EQ(sum_in(large.read_response()), 3.0F);
  EXPECT_EQ(sum_in(once("POST", "/v2/models/add/infer", body)), 3.0F);  // there is room again
}

TEST_P(http_endpoint, a_large_body_in_chunks_counts_while_it_comes) {
  options_.max_waiting_body_bytes = 100 << 10U;
  auto const body = large_addition();
  auto const chunk = fmt::format("{:x}\r\n{}\r\n", body.size(), body);
  auto const* const head =
      "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n";
  open();
  std::unique_ptr<http_client> slow;
  for (int i = 0;; ++i) {  // until its body has come before the other, which else has it refused
    ASSERT_LT(i, 1000);
    slow = std::make_unique<http_client>(endpoint_->port(), over_);
    slow->send(head + chunk);
    if (once("POST", "/v2/models/add/infer", body).status == 503) break;
    slow.reset();
    await_connections(0);
  }
  auto other = client();
  other.send(head + chunk);
  EXPECT_EQ(other.read_response().status, 503);  // before its end
  EXPECT_TRUE(other.ended());
  slow->send("0\r\n\r\n");
  EXPECT_EQ(sum_in(slow->read_response()), 3.0F);
  EXPECT_EQ(sum_in(once("POST", "/v2/models/add/infer", body)), 3.0F);  // there is room again
}

TEST_P(http_endpoint, a_large_body_counts_as_it_comes_and_not_as_it_is_announced) {
  options_.max_waiting_body_bytes = 100 << 10U;
  auto const body = large_addition();
  auto const head = fmt::format(
      "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: "
      "{}\r\n\r\n",
      body.size());
  std::deque<http_client> silent;
  for (int i = 0; i < 5; ++i) {
    silent.push_back(client());
    silent.back().send(head);
    EXPECT_EQ(silent.back().read_response().status, 100);
  }
  auto const others = once("POST", "/v2/models/add/infer", body);
  ASSERT_EQ(others.status, 200) << others.body;
  silent.back().send(body);
  auto const its = silent.back().read_response();
  EXPECT_EQ(its.status, 200) << its.body;
}

TEST_P(http_endpoint, a_compressed_body_counts_as_what_it_becomes) {
  options_.body_threads = 2;
  options_.max_waiting_body_bytes = 100 << 10U;
  auto const body = large_addition();
  auto const packed = compressed(body, {}, content_coding::gzip);
  ASSERT_LT(packed.size(), 2000U);
  constexpr auto const* gzip = "Content-Encoding: gzip\r\n";
  auto first = client();
  for (int i = 0;; ++i) {  // until it has become large before the other
    ASSERT_LT(i, 1000);
    service_.hold_lookups_of("cold");
    first.request("POST", "/v2/models/cold/infer", packed, gzip);
    if (once("POST", "/v2/models/add/infer", body).status == 503) break;
    service_.hold_lookups_of("");
    first.read_response();
  }
  EXPECT_EQ(once("POST", "/v2/models/add/infer", packed, gzip).status, 503);
  service_.hold_lookups_of("");
  EXPECT_EQ(sum_in(first.read_response()), 3.0F);
  EXPECT_EQ(sum_in(once("POST", "/v2/models/add/infer", packed, gzip)), 3.0F);
}

TEST_P(http_endpoint, large_answers_come_whole) {
  constexpr int values = 100'000;
  std::vector<float> numbers(values, 0.5F);
  json const request{
      {"inputs",
       {{{"name", "a"}, {"datatype", "FP32"}, {"shape", {values}}, {"data", numbers}},
        {{"name", "b"}, {"datatype", "FP32"}, {"shape", {values}}, {"data", numbers}}}}};
  auto const response = once("POST", "/v2/models/add/infer", request.dump());
  EXPECT_EQ(json::parse(response.body)["outputs"][0]["data"],
            json(std::vector<float>(values, 1.0F)));
}

/// The body of a request to "add" that brings its tensors behind the JSON, and the header that says so.
struct binary_addition {
  std::string body, header;
};

binary_addition binary_addition_of(std::size_t values, json const& more) {
  auto const input = [&](char const* name) {
    return json{{"name", name},
                {"datatype", "FP32"},
                {"shape", {values}},
                {"parameters", {{"binary_data_size", values * 4}}}};
  };
  json request = more;
  request["inputs"] = {input("a"), input("b")};
  binary_addition made{request.dump(), {}};
  made.header = fmt::format("Inference-Header-Content-Length: {}\r\n", made.body.size());
  for (int operand = 0; operand < 2; ++operand) {
    for (std::size_t i = 0; i < values; ++i) {
      auto const value = static_cast<float>(i + static_cast<std::size_t>(operand));
      made.body.append(reinterpret_cast<char const*>(&value), sizeof(value));
    }
  }
  return made;
}

TEST_P(http_endpoint, binary_tensors_come_and_go_whole_whatever_their_size) {
  auto connection = client();
  for (std::size_t const values : {0U, 1U, 8'000U, 9'000U, 1'000'000U}) {
    auto const sent = binary_addition_of(values, {{"parameters", {{"binary_data_output", true}}}});
    connection.request("POST", "/v2/models/add/infer", sent.body, sent.header);
    auto const response = connection.read_final_response();
    ASSERT_EQ(response.status, 200) << response.body;
    EXPECT_EQ(response.headers.at("Content-Type"), "application/octet-stream");
    auto const json_bytes = std::stoull(response.headers.at("Inference-Header-Content-Length"));
    auto const output = json::parse(response.body.substr(0, json_bytes))["outputs"][0];
    EXPECT_EQ(output, (json{{"name", "sum"},
                            {"datatype", "FP32"},
                            {"shape", {values}},
                            {"parameters", {{"binary_data_size", values * 4}}}}));
    ASSERT_EQ(response.body.size(), json_bytes + values * 4);
    std::vector<float> sums(values);
    if (values > 0) std::memcpy(sums.data(), response.body.data() + json_bytes, values * 4);
    for (std::size_t i = 0; i < values; ++i) ASSERT_EQ(sums[i], static_cast<float>(2 * i + 1));

    // the next one on the connection is answered in JSON again
    auto const plain = binary_addition_of(1, json::object());
    connection.request("POST", "/v2/models/add/infer", plain.body, plain.header);
    auto const in_json = connection.read_final_response();
    EXPECT_EQ(in_json.headers.at("Content-Type"), "application/json");
    EXPECT_EQ(in_json.headers.count("Inference-Header-Content-Length"), 0U);
    EXPECT_EQ(sum_in(in_json), 1.0F);
  }
}

TEST_P(http_endpoint, a_chunked_body_may_have_binary_tensors) {
  auto connection = client();
  auto const sent = binary_addition_of(2, json::object());
  std::string text =
      "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n" +
      sent.header + "\r\n";
  for (std::size_t at = 0; at < sent.body.size(); at += 7) {
    auto const piece = sent.body.substr(at, 7);
    text += fmt::format("{:x}\r\n{}\r\n", piece.size(), piece);
  }
  connection.send(text + "0\r\n\r\n");
  auto const response = connection.read_response();
  EXPECT_EQ(json::parse(response.body)["outputs"][0]["data"], (json{1.0, 3.0}));
}

TEST_P(http_endpoint, a_request_that_stalls_is_408) {
  options_.transfer_timeout = 50ms;
  for (auto const* const part :
       {"GET /v2 HTTP/1.1\r\n",
        "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{"}) {
    auto connection = client();
    connection.send(part);
    auto const response = connection.read_response();
    EXPECT_EQ(response.status, 408) << part;
    EXPECT_THAT(error_in(response), HasSubstr("50ms"));
    EXPECT_TRUE(connection.ended());
  }
}

TEST_P(http_endpoint, an_idle_connection_is_closed_and_a_waiting_one_is_not) {
  options_.idle_timeout = 2s;
  options_.transfer_timeout = 2s;
  service_.hold();
  auto waiting = client();
  waiting.request("POST", "/v2/models/add/infer", addition(1, 1));
  service_.await_requests(1);
  auto idle = client();
  EXPECT_TRUE(idle.ended());
  service_.release();
  EXPECT_EQ(sum_in(waiting.read_response()), 2.0F);
  EXPECT_TRUE(waiting.ended());
}

TEST_P(http_endpoint, an_answer_that_nobody_takes_is_given_up) {
  options_.transfer_timeout = 200ms;
  auto connection = client();
  // More than the socket buffers of both ends hold, asked for again and again without reading
  // anything.
  std::string text;
  for (int i = 0; i < 20'000; ++i) text += "GET /v2/models/add HTTP/1.1\r\nHost: h\r\n\r\n";
  while (connection.try_send(text)) {
  }
  await_connections(0);
}

TEST_P(http_endpoint, idle_connections_make_room_for_new_ones) {
  options_.max_connections = 2;
  options_.threads = 1;  // two may note in another order that answers have been sent
  auto first = client();
  auto second = client();
  for (auto* const each : {&first, &second, &first}) {
    each->request("GET", "/v2/health/live");
    EXPECT_EQ(each->read_response().status, 200);
  }
  EXPECT_EQ(once("GET", "/v2/health/live").status, 200);
  EXPECT_TRUE(second.ended());  // the one that has been idle longest
  await_connections(1);
  first.request("GET", "/v2/health/live");
  EXPECT_EQ(first.read_response().status, 200);
}

TEST_P(http_endpoint, connections_over_the_limit_are_told_so) {
  options_.max_connections = 2;
  service_.hold();
  auto first = client();
  auto second = client();
  first.request("POST", "/v2/models/add/infer", addition(1, 1));
  second.request("POST", "/v2/models/add/infer", addition(1, 1));
  service_.await_requests(2);
  auto third = client();
  auto const refusal = third.read_response();
  EXPECT_EQ(refusal.status, 503);
  EXPECT_EQ(refusal.headers.count("Retry-After"), 1U);
  EXPECT_THAT(error_in(refusal), HasSubstr("2 connections"));
  third.finish_sending();
  EXPECT_TRUE(third.ended());
  first.vanish();
  await_connections(1);
  EXPECT_EQ(once("GET", "/v2/health/live").status, 200);
}

TEST_P(http_endpoint, a_taken_port_is_named) {
  static_cast<void>(client());
  options_.port = endpoint_->port();
  auto const failure = thrown_by([&] { endpoint const second{options_, service_}; });
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->kind(), error_kind::already_exists);
  EXPECT_THAT(failure->what(), HasSubstr(endpoint_->address()));
}

TEST_P(http_endpoint, options_that_make_no_sense_are_refused) {
  auto const kind_with = [&](auto change) {
    auto options = options_;
    change(options);
    auto const failure = thrown_by([&] { endpoint const refused{options, service_}; });
    return failure ? std::optional{failure->kind()} : std::nullopt;
  };
  auto const invalid = error_kind::invalid_argument;
  EXPECT_EQ(kind_with([](auto& o) { o.host = "example.com"; }), invalid);
  EXPECT_EQ(kind_with([](auto& o) { o.host = "203.0.113.7"; }), invalid);
  EXPECT_EQ(kind_with([](auto& o) { o.threads = 0; }), invalid);
  EXPECT_EQ(kind_with([](auto& o) { o.max_connections = 0; }), invalid);
  EXPECT_EQ(kind_with([](auto& o) { o.idle_timeout = 0ms; }), invalid);
  EXPECT_EQ(kind_with([](auto& o) { o.host = "localhost"; }), std::nullopt);
}

TEST_P(http_endpoint, the_port_is_free_again_after_stop) {
  auto connection = client();
  connection.request("GET", "/v2/health/live");
  EXPECT_EQ(connection.read_response().status, 200);
  options_.port = endpoint_->port();
  endpoint_->stop(long_time);
  EXPECT_TRUE(connection.ended());
  endpoint_ = std::make_unique<endpoint>(options_, service_);
  EXPECT_EQ(once("GET", "/v2/health/live").status, 200);
}

TEST_P(http_endpoint, stop_finishes_what_runs_and_refuses_what_comes) {
  service_.hold();
  auto running = client();
  running.request("POST", "/v2/models/add/infer", addition(20, 22));
  auto const body = addition(1, 1);
  auto receiving = client();
  receiving.send(
      fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n"
                  "Content-Length: {}\r\n\r\n",
                  body.size()));
  EXPECT_EQ(receiving.read_until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  auto idle = client();
  service_.await_requests(1);
  await_connections(3);

  auto stopped = std::async(std::launch::async, [&] { endpoint_->stop(long_time); });
  EXPECT_TRUE(idle.ended());  // by now the server is draining
  receiving.send(body);
  service_.release();

  auto const response = running.read_response();
  EXPECT_EQ(sum_in(response), 42.0F);
  EXPECT_EQ(response.headers.at("Connection"), "close");
  EXPECT_EQ(sum_in(receiving.read_response()), 2.0F);
  EXPECT_TRUE(running.ended());
  EXPECT_TRUE(receiving.ended());
  running.vanish();
  receiving.vanish();
  stopped.get();
  EXPECT_EQ(endpoint_->connections(), 0U);
  EXPECT_THROW(http_client{endpoint_->port()}, std::runtime_error);
  endpoint_->stop(long_time);  // again: nothing
}

TEST_P(http_endpoint, stop_cuts_what_outlasts_its_grace) {
  service_.hold();
  auto running = client();
  running.request("POST", "/v2/models/add/infer", addition(1, 1));
  service_.await_requests(1);
  endpoint_->stop(20ms);
  EXPECT_TRUE(running.ended());
  service_.release();  // the answer comes to an endpoint that has stopped
  service_.await_answers(1);
}

TEST_P(http_endpoint, a_service_may_answer_after_the_endpoint_is_gone) {
  service_.hold();
  std::vector<http_client> connections;
  for (int i = 0; i < 8; ++i) {
    connections.push_back(client());
    connections.back().request("POST", "/v2/models/add/infer", addition(1, 1));
  }
  service_.await_requests(8);
  service_.release();  // answers race with the end
  endpoint_.reset();
  service_.await_answers(8);
}

TEST_P(http_endpoint, stopping_under_load_answers_or_ends_every_connection) {
  for (int round = 0; round < 10; ++round) {
    auto first = client();
    auto const port = endpoint_->port();
    std::atomic<bool> enough{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        while (!enough) {
          try {
            http_client connection{port, over_};
            while (!enough) {
              connection.request("POST", "/v2/models/add/infer", addition(1, 1));
              EXPECT_EQ(sum_in(connection.read_response()), 2.0F);
            }
          } catch (std::runtime_error const&) {  // the server is gone, or ended this connection
          }
        }
      });
    }
    service_.await_answers(static_cast<std::size_t>(round + 1) * 20);
    endpoint_->stop(long_time);
    enough = true;
    for (auto& thread : threads) thread.join();
    endpoint_.reset();
  }
}

INSTANTIATE_TEST_SUITE_P(over, http_endpoint, testing::Values(transport::plain, transport::tls),
                         [](auto const& of) {
                           return of.param == transport::plain ? "plain" : "tls";
                         });

TEST_P(http_endpoint, watches_a_socket_until_nothing_more_will_come) {
  static_cast<void>(client());
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
  std::promise<std::string> end;
  std::string heard;
  ASSERT_TRUE(endpoint_->watch(
      ends[0],
      [&heard](int socket) {
        for (std::array<char, 8> some{};;) {
          auto const got = ::recv(socket, some.data(), some.size(), MSG_DONTWAIT);
          if (got <= 0) return got < 0;
          heard.append(some.data(), static_cast<std::size_t>(got));
        }
      },
      [&] { end.set_value(heard); }));
  ::close(ends[0]);  // it has its own
  for (char const* const text : {"a", "b", "c"}) {
    ASSERT_EQ(::send(ends[1], text, 1, 0), 1);
  }
  ::close(ends[1]);
  EXPECT_EQ(end.get_future().get(), "abc");
}

TEST_P(http_endpoint, says_that_it_watches_no_more_when_it_is_stopped) {
  static_cast<void>(client());
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
  std::atomic<int> ended = 0;
  auto const watch = [&] {
    return endpoint_->watch(
        ends[0], [](int /*socket*/) { return true; }, [&] { ++ended; });
  };
  ASSERT_TRUE(watch());
  endpoint_->stop(0ms);
  EXPECT_EQ(ended, 1);
  EXPECT_FALSE(watch());
  EXPECT_EQ(ended, 1);
  for (auto const each : ends) ::close(each);
}

}  // namespace
}  // namespace sluice::server
