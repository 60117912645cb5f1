/// The endpoint and an engine that says byte for byte what a test has it say.
#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/inference/engine_gateway.hpp"
#include "tests/runtime/server/endpoint_fixture.hpp"

namespace sluice::server {
namespace {

using memhandover::unique_fd;
using namespace std::chrono_literals;

/// A connection to the engine, from its side.
class engine_side {
 public:
  explicit engine_side(unique_fd socket) : socket_(std::move(socket)) {
    timeval const patience{60, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  }
  /// What comes up to `end`; all that comes, where it does not.
  std::string read_until(std::string_view end) {
    std::string all;
    char byte = 0;
    while (!all.ends_with(end) && ::recv(socket_.get(), &byte, 1, 0) == 1) {
      all += byte;
    }
    return all;
  }
  std::string read_head() { return read_until("\r\n\r\n"); }
  /// False if the other side has gone.
  bool say(std::string_view text) {
    while (!text.empty()) {
      auto const sent = ::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      text.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }
  bool sees_the_end() {
    char byte = 0;
    return ::recv(socket_.get(), &byte, 1, 0) <= 0;
  }
  void leave() { socket_.reset(); }

 private:
  unique_fd socket_;
};

/// One engine at /e/*, with places without end, unless `admission` is another.
class one_engine final : public engine_gateway {
 public:
  one_engine() : listening_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)} {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listening_.get(), generic, length), 0);
    EXPECT_EQ(::listen(listening_.get(), 64), 0);
    EXPECT_EQ(::getsockname(listening_.get(), generic, &length), 0);
    port_ = ntohs(address.sin_port);
  }

  engine_side accept() {
    return engine_side{unique_fd{::accept(listening_.get(), nullptr, nullptr)}};
  }

  [[nodiscard]] std::optional<std::size_t> find(std::string_view target) const override {
    return target.starts_with("/e/") ? std::optional<std::size_t>{0} : std::nullopt;
  }
  [[nodiscard]] std::string const& name_of(std::size_t /*engine*/) const override { return name_; }
  [[nodiscard]] engine_limits limits_of(std::size_t /*engine*/) const override { return limits; }
  engine_ticket enter(std::size_t /*engine*/,
                      std::function<void(engine_admission)> admitted) override {
    std::unique_lock lock{mutex_};
    auto const ticket = ++tickets_;
    if (holds_back) {
      waiting_.emplace(ticket, std::move(admitted));
      changed_.notify_all();
      return ticket;
    }
    lock.unlock();
    admitted(engine_address{{}, port_});
    return ticket;
  }
  void send_back(engine_ticket /*which*/) override { ADD_FAILURE() << "it has been reached"; }
  void leave(engine_ticket which, relay_report const& report) override {
    std::lock_guard const lock{mutex_};
    waiting_.erase(which);
    reports_.push_back(report);
    changed_.notify_all();
  }

  /// Blocks until it has ended.
  relay_report next_report() {
    std::unique_lock lock{mutex_};
    EXPECT_TRUE(changed_.wait_for(lock, long_time, [&] { return !reports_.empty(); }));
    auto first = reports_.empty() ? relay_report{} : reports_.front();
    if (!reports_.empty()) reports_.pop_front();
    return first;
  }
  /// Gives a request its answer that waits, or will.
  void admit(engine_admission const& admission) {
    std::unique_lock lock{mutex_};
    ASSERT_TRUE(changed_.wait_for(lock, long_time, [&] { return !waiting_.empty(); }));
    auto const first = std::exchange(waiting_.begin()->second, nullptr);
    waiting_.erase(waiting_.begin());
    lock.unlock();
    first(admission);
  }
  void await_waiting() {
    std::unique_lock lock{mutex_};
    ASSERT_TRUE(changed_.wait_for(lock, long_time, [&] { return !waiting_.empty(); }));
  }

  engine_limits limits{.until_answer = 10min, .silence = 10min};
  bool holds_back = false;

 private:
  std::string const name_ = "echo";
  unique_fd listening_;
  std::uint16_t port_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  engine_ticket tickets_ = 0;
  std::map<engine_ticket, std::function<void(engine_admission)>> waiting_;
  std::deque<relay_report> reports_;
};

class relayed : public http_endpoint {
 protected:
  relayed() { options_.engines = &engine_; }
  ~relayed() override { endpoint_.reset(); }  // before the engine
  relayed(relayed const&) = delete;
  relayed& operator=(relayed const&) = delete;
  relayed(relayed&&) = delete;
  relayed& operator=(relayed&&) = delete;

  one_engine engine_;
};

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
