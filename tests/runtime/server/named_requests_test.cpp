/// Requests whose bodies name their engine: what the endpoint reads of them, and what the engine gets.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>
#include <string>

#include "tests/runtime/server/relay_fixture.hpp"

namespace sluice::server {
namespace {

class named_request : public relayed {
 protected:
  named_request() = default;

  static nlohmann::json error_of(client_response const& response) {
    return nlohmann::json::parse(response.body).at("error");
  }
};

INSTANTIATE_TEST_SUITE_P(over, named_request, testing::Values(transport::plain, transport::tls));

constexpr auto const* as_json = "Content-Type: application/json\r\n";
constexpr auto const* hi = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";

std::string head_of(std::size_t length) {
  return "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: " +
         std::to_string(length) + "\r\n\r\n";
}

TEST_P(named_request, the_engine_gets_the_body_as_it_came_whole) {
  auto connection = client();
  for (std::string const body :
       {R"({"model": "chat"})", R"( {"messages": [], "model":"org/chat"} )"}) {
    connection.request("POST", "/v1/chat/completions", body, as_json);
    auto side = engine_.accept();
    EXPECT_NE(side.read_head().find("Content-Length: " + std::to_string(body.size())),
              std::string::npos);
    EXPECT_EQ(side.read(body.size()), body);
    EXPECT_TRUE(side.say(hi));
    EXPECT_EQ(connection.read_response().body, "hi");
    EXPECT_EQ(engine_.next_report().outcome, relay_outcome::answered);
  }
}

TEST_P(named_request, a_model_that_comes_last_behind_a_large_image_is_found) {
  auto const body = R"({"image": ")" + std::string(3U << 20U, 'i') + R"(", "model": "chat"})";
  auto connection = client();
  auto sending = std::async(std::launch::async, [&] {
    connection.request("POST", "/v1/chat/completions", body, as_json);
  });
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_EQ(side.read(body.size()), body);
  EXPECT_TRUE(side.say(hi));
  EXPECT_EQ(connection.read_response().status, 200);
  sending.get();
}

TEST_P(named_request, a_body_in_chunks_stays_so_with_the_fields_behind_it) {
  auto connection = client();
  connection.send(
      "POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
      "5\r\n{\"mod\r\n");
  connection.send("b\r\nel\":\"chat\"}\r\n");
  auto side = engine_.accept();
  EXPECT_NE(side.read_head().find("Transfer-Encoding: chunked"), std::string::npos);
  EXPECT_EQ(side.read_until("}\r\n"), "10\r\n{\"model\":\"chat\"}\r\n");
  connection.send("0\r\nX-Sum: 4\r\n\r\n");
  EXPECT_EQ(side.read_until("\r\n\r\n"), "0\r\nX-Sum: 4\r\n\r\n");
  EXPECT_TRUE(side.say(hi));
  EXPECT_EQ(connection.read_response().body, "hi");
}

TEST_P(named_request, what_comes_after_the_model_passes_as_the_engine_takes_it) {
  auto const begin = std::string{R"({"model": "chat", "prompt": ")"};
  auto const prompt = std::string(64U << 20U, 'p');  // beyond what the sockets between them hold
  options_.max_body_bytes = 128U << 20U;
  auto connection = client();
  connection.send(head_of(begin.size() + prompt.size() + 2) + begin);
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_EQ(side.read(begin.size()), begin);
  std::atomic<bool> is_sent{false};
  auto sending = std::async(std::launch::async, [&] {
    connection.send(prompt + "\"}");
    is_sent = true;
  });
  EXPECT_EQ(side.read(1), "p");
  EXPECT_FALSE(is_sent);  // nobody has taken it
  (void)side.read(prompt.size() - 1 + 2);
  EXPECT_TRUE(side.say(hi));
  EXPECT_EQ(connection.read_response().status, 200);
  sending.get();
}

TEST_P(named_request, the_engine_never_has_the_whole_of_a_body_that_is_wrong_at_its_end) {
  for (std::string const end :
       {R"("model": "org/chat"})", R"("x": 1)", R"("x": 1}})", R"("x": NaN})"}) {
    std::string const begin{R"({"model": "chat", )"};
    auto connection = client();
    connection.send(head_of(begin.size() + end.size()) + begin);
    auto side = engine_.accept();
    (void)side.read_head();
    EXPECT_EQ(side.read(begin.size()), begin);
    connection.send(end);
    auto const answer = connection.read_response();
    EXPECT_EQ(answer.status, 400) << end;
    EXPECT_EQ(error_of(answer)["type"], "invalid_request_error");
    EXPECT_EQ(side.read_until("}"), "") << end;
    EXPECT_EQ(engine_.next_report().outcome, relay_outcome::client_left);
  }
}

TEST_P(named_request, who_names_no_model_that_is_there_hears_so_in_openais_form) {
  auto connection = client();
  auto const ask = [&](std::string_view body) {
    connection.request("POST", "/v1/chat/completions", body, as_json);
    return connection.read_response();
  };
  auto const unknown = ask(R"({"model": "chet"})");
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(error_of(unknown)["code"], "model_not_found");
  EXPECT_NE(error_of(unknown)["message"].get<std::string>().find("chat, org/chat"),
            std::string::npos);
  for (auto const* const body : {"{}", "", "[]", "nonsense", R"({"model": 1})"}) {
    auto const answer = ask(body);
    EXPECT_EQ(answer.status, 400) << body;
    EXPECT_EQ(error_of(answer)["type"], "invalid_request_error") << body;
  }
}

TEST_P(named_request, what_cannot_be_read_is_refused_before_its_body) {
  for (auto const* const field :
       {"Content-Encoding: gzip\r\n", "Content-Type: multipart/form-data; boundary=x\r\n",
        "Content-Type: text/plain\r\n",
        "Content-Type: application/json\r\nContent-Type: text/xml\r\n"}) {
    auto const answer = once("POST", "/v1/chat/completions", R"({"model": "chat"})", field);
    EXPECT_EQ(answer.status, 415) << field;
    EXPECT_TRUE(error_of(answer)["message"].is_string());
  }
  auto const got = once("GET", "/v1/chat/completions");
  EXPECT_EQ(got.status, 405);
  EXPECT_EQ(got.headers.at("Allow"), "POST");
  EXPECT_EQ(once("POST", "/v1/models", "{}").headers.at("Allow"), "GET, HEAD");
  for (auto const* const field :
       {"Content-Encoding: identity\r\n", "Content-Type: APPLICATION/JSON; charset=utf-8\r\n",
        "Content-Type: application/vnd.x+json\r\n"}) {
    auto const answer = once("POST", "/v1/chat/completions", R"({"model": "none"})", field);
    EXPECT_EQ(answer.status, 404) << field;
  }
}

TEST_P(named_request, a_body_beyond_the_bounds_is_refused_in_openais_form) {
  options_.max_body_bytes = 1000;
  auto const said = once("POST", "/v1/completions", std::string(1001, ' '), as_json);
  EXPECT_EQ(said.status, 413);
  EXPECT_NE(error_of(said)["message"].get<std::string>().find("1000 bytes"), std::string::npos);
  auto connection = client();
  connection.send(
      "POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" +
      std::string(1001, ' '));
  EXPECT_EQ(connection.read_response().status, 413);
}

TEST_P(named_request, bodies_whose_model_is_not_found_yet_share_what_may_wait) {
  options_.max_waiting_body_bytes = 1;
  auto const begin = R"({"prompt": ")" + std::string(100'000, 'x');
  std::optional<http_client> first;
  for (int i = 0;; ++i) {  // until it has been read before the other
    ASSERT_LT(i, 1000);
    first.emplace(client());
    first->send(head_of(200'000) + begin);  // stays, and waits for more
    auto const answer = once("POST", "/v1/completions", begin + R"("})", as_json);
    bool const refused = answer.status == 503;
    ASSERT_TRUE(refused || answer.status == 400) << answer.status;
    EXPECT_EQ(error_of(answer)["type"], refused ? "server_error" : "invalid_request_error");
    EXPECT_EQ(answer.headers.contains("Retry-After"), refused);
    if (refused) break;
    first.reset();
    await_connections(0);
  }
  first->leave();
  for (int status = 0; status != 400;) {  // its room is free again
    status = once("POST", "/v1/completions", begin + R"("})", as_json).status;
  }
}

TEST_P(named_request, a_client_that_waits_for_an_invitation_gets_one) {
  auto connection = client();
  connection.send(
      "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 17\r\nExpect: "
      "100-continue\r\n\r\n");
  EXPECT_EQ(connection.read_response(false).status, 100);
  connection.send(R"({"model": "chat"})");
  auto side = engine_.accept();
  EXPECT_EQ(side.read_head().find("Expect"), std::string::npos);
  EXPECT_EQ(side.read(17), R"({"model": "chat"})");
  EXPECT_TRUE(side.say(hi));
  EXPECT_EQ(connection.read_response().body, "hi");
}

TEST_P(named_request, a_body_that_does_not_come_is_not_waited_for_without_end) {
  options_.transfer_timeout = std::chrono::milliseconds{50};
  auto connection = client();
  connection.send(head_of(100) + R"({"prompt": ")");
  auto const answer = connection.read_response();
  EXPECT_EQ(answer.status, 408);
  EXPECT_TRUE(error_of(answer)["message"].is_string());
}

TEST_P(named_request, a_client_that_leaves_within_its_body_takes_no_room) {
  {
    auto connection = client();
    connection.send(head_of(100'000) + R"({"prompt": ")");
    await_connections(1);
  }
  await_connections(0);
}

TEST_P(named_request, requests_sent_ahead_are_answered_one_after_the_other) {
  auto connection = client();
  std::string const unknown{R"({"model": "none"})"};
  connection.send(head_of(unknown.size()) + unknown + "GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n" +
                  head_of(17) + R"({"model": "chat"})" +
                  "GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n");
  EXPECT_EQ(connection.read_response().status, 404);
  EXPECT_EQ(nlohmann::json::parse(connection.read_response().body)["data"].size(), 2U);
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_EQ(side.read(17), R"({"model": "chat"})");
  EXPECT_TRUE(side.say(hi));
  EXPECT_EQ(connection.read_response().body, "hi");
  EXPECT_EQ(connection.read_response().status, 200);
}

TEST_P(named_request, models_are_listed_without_an_engine) {
  EXPECT_EQ(nlohmann::json::parse(once("GET", "/v1/models").body)["object"], "list");
  EXPECT_EQ(nlohmann::json::parse(once("GET", "/v1/models/org%2Fchat").body)["id"], "org/chat");
  auto const none = once("GET", "/v1/models/none");
  EXPECT_EQ(none.status, 404);
  EXPECT_EQ(error_of(none)["code"], "model_not_found");
}

TEST_P(named_request, tokens_of_a_stream_are_timed_and_nothing_else_is) {
  std::string const token{"data: {\"choices\": [{\"text\": \"a\"}]}\n\n"};
  auto const stream = [&](std::string_view type, std::string_view target) {
    auto connection = client();
    connection.request("POST", target, R"({"model": "chat"})", as_json);
    auto side = engine_.accept();
    (void)side.read_head();
    EXPECT_EQ(side.read(17), R"({"model": "chat"})");
    EXPECT_TRUE(side.say("HTTP/1.1 200 OK\r\nContent-Type: " + std::string{type} +
                         "\r\nContent-Length: " + std::to_string(3 * token.size() + 6) +
                         "\r\n\r\n: hi\n\n" + token));
    (void)connection.read_until(token);  // the others come later
    EXPECT_TRUE(side.say(token + token));
    (void)connection.read_until(token + token);
    EXPECT_EQ(engine_.next_report().outcome, relay_outcome::answered);
  };
  stream("text/event-stream; charset=utf-8", "/v1/completions");
  EXPECT_EQ(engine_.first_tokens().size(), 1U);
  EXPECT_GT(engine_.first_tokens().front().count(), 0);
  EXPECT_EQ(engine_.gaps(), 2U);
  stream("application/json", "/v1/completions");
  stream("text/event-stream\r\nContent-Encoding: gzip", "/v1/completions");
  stream("text/event-stream", "/e/x");
  EXPECT_EQ(engine_.first_tokens().size(), 1U);
  EXPECT_EQ(engine_.gaps(), 2U);
}

TEST_P(named_request, tokens_that_came_count_when_the_client_leaves) {
  auto connection = client();
  connection.request("POST", "/v1/completions", R"({"model": "chat"})", as_json);
  auto side = engine_.accept();
  (void)side.read_head();
  EXPECT_TRUE(
      side.say("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
               "data: {\"delta\": \"a\"}\n\ndata: {\"delta\": \"b\"}\n\n"));
  (void)connection.read_until("\"b\"}\n\n");
  connection.vanish();
  EXPECT_EQ(engine_.next_report().outcome, relay_outcome::client_left);
  EXPECT_EQ(engine_.first_tokens().size(), 1U);
  EXPECT_EQ(engine_.gaps(), 1U);
}

TEST_P(named_request, a_refusal_of_the_engines_keeper_is_in_openais_form) {
  engine_.holds_back = true;
  auto connection = client();
  connection.request("POST", "/v1/completions", R"({"model": "chat"})", as_json);
  engine_.admit(error{error_kind::unavailable, "no engine today", 2500ms});
  auto const answer = connection.read_response();
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(answer.headers.at("Retry-After"), "3");
  EXPECT_EQ(error_of(answer)["message"], "no engine today");
  connection.request("GET", "/v2/nothing");  // in the other protocol's
  EXPECT_TRUE(error_of(connection.read_response()).is_string());
}

}  // namespace
}  // namespace sluice::server
