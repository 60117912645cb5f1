/// An engine that says byte for byte what a test has it say, and an endpoint that relays to it.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/inference/engine_gateway.hpp"
#include "tests/runtime/server/endpoint_fixture.hpp"

namespace sluice::server {

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
  /// Reads `count` bytes.
  std::string read(std::size_t count) {
    std::string all(count, '\0');
    EXPECT_EQ(::recv(socket_.get(), all.data(), count, MSG_WAITALL), static_cast<ssize_t>(count));
    return all;
  }
  bool sees_the_end() {
    char byte = 0;
    return ::recv(socket_.get(), &byte, 1, 0) <= 0;
  }
  void leave() { socket_.reset(); }

 private:
  unique_fd socket_;
};

/// One engine at /e/*, and with the models "chat" and "org/chat" below /v1, with places without end, unless `admission` is another.
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
    address_.port = ntohs(address.sin_port);
  }
  ~one_engine() override {
    if (!address_.socket.empty()) std::filesystem::remove(address_.socket);
  }
  one_engine(one_engine const&) = delete;
  one_engine& operator=(one_engine const&) = delete;
  one_engine(one_engine&&) = delete;
  one_engine& operator=(one_engine&&) = delete;

  /// From now on it listens on a Unix socket, and no longer on a port.
  void listen_on_unix_socket() {
    static std::atomic<int> next{0};
    address_ = {testing::TempDir() + "relay-" + std::to_string(::getpid()) + "-" +
                    std::to_string(++next) + ".sock",
                0};
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    ASSERT_LT(address_.socket.size(), sizeof address.sun_path);
    address_.socket.copy(address.sun_path, address_.socket.size());
    listening_ = unique_fd{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    ASSERT_EQ(::bind(listening_.get(), reinterpret_cast<sockaddr const*>(&address), sizeof address),
              0);
    ASSERT_EQ(::listen(listening_.get(), 64), 0);
  }
  [[nodiscard]] engine_address const& address() const { return address_; }

  engine_side accept() {
    return engine_side{unique_fd{::accept(listening_.get(), nullptr, nullptr)}};
  }

  [[nodiscard]] std::optional<engine_route> find(std::string_view target) const override {
    if (target.starts_with("/v1/")) return engine_route{engine_route::kind::model};
    return target.starts_with("/e/") ? std::optional{engine_route{}} : std::nullopt;
  }
  [[nodiscard]] std::optional<std::size_t> find_model(std::string_view name) const override {
    return name == "chat" || name == "org/chat" ? std::optional<std::size_t>{0} : std::nullopt;
  }
  [[nodiscard]] std::vector<std::string> model_names() const override {
    return {"chat", "org/chat"};
  }
  [[nodiscard]] nlohmann::json models() const override {
    return {{{"id", "chat"}, {"object", "model"}}, {{"id", "org/chat"}, {"object", "model"}}};
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
    inside_.emplace(ticket, admitted);
    lock.unlock();
    admitted(address_);
    return ticket;
  }
  engine_connection reuse(engine_ticket /*which*/) override {
    std::lock_guard const lock{mutex_};
    if (kept_.empty()) return {{}, run_of_new};
    auto last = std::move(kept_.back());
    kept_.pop_back();
    return last;
  }
  void keep(engine_ticket /*which*/, engine_connection connection) override {
    std::lock_guard const lock{mutex_};
    kept_.push_back(std::move(connection));
  }
  void note_tokens(engine_ticket which, token_times const& came) override {
    std::lock_guard const lock{mutex_};
    EXPECT_TRUE(inside_.contains(which));
    if (came.first) first_tokens_.push_back(*came.first);
    gaps_ += came.gaps.size();
  }
  void send_back(engine_ticket which) override {
    std::lock_guard const lock{mutex_};
    sent_back_.push_back(which);
    waiting_.insert(inside_.extract(which));
    changed_.notify_all();
  }
  void leave(engine_ticket which, relay_report const& report) override {
    std::lock_guard const lock{mutex_};
    waiting_.erase(which);
    inside_.erase(which);
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
    auto first = waiting_.extract(waiting_.begin());
    auto const answer = first.mapped();
    if (std::holds_alternative<engine_address>(admission)) {
      inside_.insert(std::move(first));  // who is refused is not inside, and does not leave
    }
    lock.unlock();
    answer(admission);
  }
  void await_waiting() {
    std::unique_lock lock{mutex_};
    ASSERT_TRUE(changed_.wait_for(lock, long_time, [&] { return !waiting_.empty(); }));
  }

  /// Blocks until a request has been sent back, which nobody had expected.
  void await_sent_back() {
    std::unique_lock lock{mutex_};
    ASSERT_TRUE(changed_.wait_for(lock, long_time, [&] { return !sent_back_.empty(); }));
    sent_back_.clear();
  }
  bool has_sent_back() {
    std::lock_guard const lock{mutex_};
    return !sent_back_.empty();
  }
  std::vector<std::chrono::nanoseconds> first_tokens() {
    std::lock_guard const lock{mutex_};
    return first_tokens_;
  }
  std::size_t gaps() {
    std::lock_guard const lock{mutex_};
    return gaps_;
  }
  std::size_t kept() {
    std::lock_guard const lock{mutex_};
    return kept_.size();
  }
  void stop_listening() { listening_.reset(); }

  engine_limits limits{.until_answer = 10min, .silence = 10min};
  std::uint64_t const run_of_new = 7;
  bool holds_back = false;

 private:
  std::string const name_ = "echo";
  unique_fd listening_;
  engine_address address_;
  std::mutex mutex_;
  std::condition_variable changed_;
  engine_ticket tickets_ = 0;
  std::map<engine_ticket, std::function<void(engine_admission)>> waiting_, inside_;
  std::deque<relay_report> reports_;
  std::vector<engine_connection> kept_;
  std::vector<engine_ticket> sent_back_;
  std::vector<std::chrono::nanoseconds> first_tokens_;
  std::size_t gaps_ = 0;
};

class relayed : public http_endpoint {
 protected:
  relayed() { options_.engines = &engine_; }
  ~relayed() override {
    endpoint_.reset();  // before the engine
    EXPECT_FALSE(engine_.has_sent_back());
  }
  relayed(relayed const&) = delete;
  relayed& operator=(relayed const&) = delete;
  relayed(relayed&&) = delete;
  relayed& operator=(relayed&&) = delete;

  one_engine engine_;
};

}  // namespace sluice::server
