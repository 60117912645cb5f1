#include "runtime/cli/pool_and_server.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/write.hpp>
#include <string>
#include <thread>

#include "memhandover/base/error.hpp"

namespace sluice::cli {
namespace {

namespace asio = boost::asio;
using nlohmann::json;
using testing::HasSubstr;
using namespace std::chrono_literals;

/// A listener on a free port of the loopback address that gives one fixed answer to one request.
class one_answer {
 public:
  explicit one_answer(std::string answer)
      : thread_([this, answer = std::move(answer)] {
          asio::ip::tcp::socket peer{context_};
          acceptor_.accept(peer);
          boost::system::error_code ignored;
          auto const size =
              asio::read_until(peer, asio::dynamic_buffer(request_), "\r\n\r\n", ignored);
          request_.resize(size);
          asio::write(peer, asio::buffer(answer), ignored);
        }) {}
  one_answer(one_answer const&) = delete;
  one_answer& operator=(one_answer const&) = delete;
  ~one_answer() { thread_.join(); }

  [[nodiscard]] std::string endpoint() const {
    return "127.0.0.1:" + std::to_string(acceptor_.local_endpoint().port());
  }
  [[nodiscard]] std::string const& request() {
    thread_.join();
    thread_ = std::thread{[] {}};
    return request_;
  }

 private:
  asio::io_context context_;
  asio::ip::tcp::acceptor acceptor_{context_, {asio::ip::address_v4::loopback(), 0}};
  std::string request_;
  std::thread thread_;
};

std::string with_body(std::string const& status, std::string const& body) {
  return "HTTP/1.1 " + status + "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" +
         body;
}

error failure(std::string const& endpoint, std::chrono::milliseconds patience = 5000ms) {
  try {
    (void)get_json(endpoint, "/v2/sluice/status", patience);
  } catch (error const& why) {
    return why;
  }
  return {error_kind::internal, "there was an answer"};
}

TEST(get_json, asks_for_the_target_and_reads_the_body) {
  one_answer server{with_body("200 OK", R"({"models": []})")};
  EXPECT_EQ(get_json(server.endpoint(), "/v2/sluice/status", 5000ms),
            json::parse(R"({"models": []})"));
  EXPECT_THAT(server.request(), testing::StartsWith("GET /v2/sluice/status HTTP/1.1\r\n"));
  EXPECT_THAT(server.request(), HasSubstr("Host: " + server.endpoint() + "\r\n"));
}

TEST(get_json, an_http_error_is_told_with_its_status) {
  one_answer server{with_body("404 Not Found", "{}")};
  EXPECT_THAT(failure(server.endpoint()).what(), HasSubstr("answers with status 404"));
}

TEST(get_json, an_answer_that_is_no_json_is_refused) {
  one_answer server{with_body("200 OK", "<html>")};
  EXPECT_THAT(failure(server.endpoint()).what(), HasSubstr("answers with no JSON"));
}

TEST(get_json, a_server_that_hangs_up_is_unavailable) {
  one_answer server{""};
  auto const why = failure(server.endpoint());
  EXPECT_EQ(why.kind(), error_kind::unavailable);
  EXPECT_THAT(why.what(), HasSubstr("cannot be read"));
}

TEST(get_json, a_port_where_nobody_listens_is_unavailable) {
  std::string endpoint;
  {
    one_answer gone{""};
    endpoint = gone.endpoint();
    (void)failure(endpoint);
  }
  EXPECT_EQ(failure(endpoint).kind(), error_kind::unavailable);
}

TEST(get_json, a_server_that_stays_silent_does_not_hold_the_command) {
  asio::io_context context;
  asio::ip::tcp::acceptor const silent{context, {asio::ip::address_v4::loopback(), 0}};
  auto const endpoint = "127.0.0.1:" + std::to_string(silent.local_endpoint().port());
  EXPECT_EQ(failure(endpoint, 50ms).kind(), error_kind::deadline_exceeded);
}

TEST(get_json, an_endpoint_without_a_port_is_told) {
  EXPECT_THAT(failure("localhost").what(), HasSubstr("is not host:port"));
}

TEST(merged, the_pool_speaks_for_the_pool_and_the_server_for_its_models) {
  auto const pool = json::parse(R"({"pool": {"id": 1}, "handovers": {"count": 2},
                                    "server": {"endpoint": "e:1", "answers": true}})");
  auto const server = json::parse(R"({"models": [{"name": "m"}], "handovers": [{"model": "m"}],
                                      "server": {"state": "ready", "endpoint": "other"}})");
  EXPECT_EQ(merged(pool, server), json::parse(R"({
    "pool": {"id": 1}, "handovers": {"count": 2}, "models": [{"name": "m"}],
    "server": {"endpoint": "e:1", "answers": true, "state": "ready", "handovers": [{"model": "m"}]}})"));
}

TEST(merged, an_answer_that_is_no_object_changes_nothing) {
  auto const pool = json::parse(R"({"pool": {"id": 1}})");
  EXPECT_EQ(merged(pool, json::array()), pool);
}

}  // namespace
}  // namespace sluice::cli
