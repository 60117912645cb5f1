#include "runtime/server/engines/engine_keeper.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "memhandover/base/wire.hpp"
#include "runtime/server/engines/engine_process.hpp"

namespace sluice::server {
namespace {

using memhandover::unique_fd;
using nlohmann::json;
using namespace std::chrono_literals;

constexpr int patience_ms = 60'000;

class an_engines_keeper : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path{testing::TempDir()} / "keeper-XXXXXX";
    auto path = folder_.string();
    ASSERT_NE(::mkdtemp(path.data()), nullptr);
    folder_ = path;
  }
  void TearDown() override {
    owner_.reset();
    if (keeper_ > 0) {
      (void)::kill(keeper_, SIGKILL);
      (void)::waitpid(keeper_, nullptr, 0);
    }
    std::filesystem::remove_all(folder_);
  }

  /// The owner's end of the conversation is `owner_`.
  void keep(std::vector<std::string> const& command, std::chrono::milliseconds patience = 1h) {
    std::array<int, 2> ends{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
    unique_fd given{ends[1]};
    owner_.reset(ends[0]);
    keeper_ = ::fork();
    if (keeper_ == 0) {
      owner_.reset();
      ::_exit(keep_engine(std::move(given)));
    }
    given.reset();
    unique_fd const log{::open("/dev/null", O_WRONLY | O_CLOEXEC)};
    memhandover::send_message(owner_.get(),
                              {{"type", "run"},
                               {"command", command},
                               {"environment", {"PATH=/usr/bin:/bin"}},
                               {"folder", "/"},
                               {"meeting", new_meeting_place(folder_, 0).string()},
                               {"patience_ms", patience.count()},
                               {"identity", {{"name", "chat"}}},
                               {"address", {{"socket", ""}, {"port", 8123}}},
                               {"log", "/dev/null"},
                               {"log_begin", 0}},
                              {log.get()});
    engine_ = said().value("pid", 0);
    ASSERT_GT(engine_, 0);
  }
  void say(json const& what) { memhandover::send_message(owner_.get(), what); }
  /// To the owner.
  json said() {
    auto came = memhandover::receive_message(owner_.get(), patience_ms);
    return came ? came->body : json{};
  }
  static json said_to(engine_process& server) {
    for (;;) {
      if (auto came = server.hear()) return *came;
      pollfd waited{server.socket(), POLLIN, 0};
      if (::poll(&waited, 1, patience_ms) != 1) return {};
    }
  }
  [[nodiscard]] std::unique_ptr<engine_process> meet() const {
    auto const places = meeting_places(folder_, 0);
    return places.size() == 1 ? engine_process::meet(places.front()) : nullptr;
  }
  /// Returns when all has ended.
  void await_end() {
    ASSERT_EQ(::waitpid(keeper_, nullptr, 0), keeper_);
    keeper_ = 0;
    EXPECT_EQ(::kill(engine_, 0), -1);
    EXPECT_TRUE(meeting_places(folder_, 0).empty());
  }

  std::filesystem::path folder_;
  unique_fd owner_;
  pid_t keeper_ = 0, engine_ = 0;
};

TEST_F(an_engines_keeper, gives_an_engine_that_is_left_to_the_next_server) {
  keep({"sleep", "1000"});
  auto next = meet();
  ASSERT_NE(next, nullptr);
  EXPECT_EQ(next->identity(), (json{{"name", "chat"}}));
  EXPECT_EQ(next->address().port, 8123);
  EXPECT_EQ(next->pid(), engine_);
  EXPECT_FALSE(next->is_own());
  next->adopt();
  say({{"type", "leave"}, {"notes", {{"ready", true}}}});
  auto const given = said_to(*next);
  EXPECT_EQ(given, (json{{"type", "yours"}, {"notes", {{"ready", true}}}, {"shared", true}}));
  EXPECT_TRUE(next->is_own());
  owner_.reset();
  EXPECT_EQ(said_to(*next).value("type", ""), "alone");
  EXPECT_EQ(::kill(engine_, 0), 0);
  next.reset();
  await_end();
}

TEST_F(an_engines_keeper, ends_an_engine_whose_server_goes_without_a_word) {
  keep({"sleep", "1000"});
  owner_.reset();
  await_end();
}

TEST_F(an_engines_keeper, ends_an_engine_for_which_nobody_comes) {
  keep({"sleep", "1000"}, 1ms);
  say({{"type", "leave"}, {"notes", json::object()}});
  owner_.reset();
  await_end();
}

TEST_F(an_engines_keeper, kills_one_for_which_nobody_comes_and_that_does_not_end) {
  keep({"sh", "-c", "trap '' TERM; while :; do sleep 1000; done"}, 1ms);
  say({{"type", "leave"}, {"notes", json::object()}});
  owner_.reset();
  await_end();
}

TEST_F(an_engines_keeper, gives_the_engine_of_a_server_that_is_killed_to_who_waits_for_it) {
  keep({"sleep", "1000"});
  auto const next = meet();
  ASSERT_NE(next, nullptr);
  next->adopt();
  // What is said and heard afterwards has been said when it was known who waits.
  auto const other = meet();
  ASSERT_NE(other, nullptr);
  owner_.reset();
  EXPECT_EQ(said_to(*next),
            (json{{"type", "yours"}, {"notes", json::object()}, {"shared", false}}));
}

TEST_F(an_engines_keeper,
       offers_the_engine_again_where_a_successor_is_killed_and_the_first_uses_it) {
  keep({"sleep", "1000"});
  say({{"type", "leave"}, {"notes", {{"ready", true}}}});
  {
    auto const next = meet();
    ASSERT_NE(next, nullptr);
    next->adopt();
    ASSERT_EQ(said_to(*next).value("type", ""), "yours");
    unique_fd const held{::dup(next->socket())};
    // As its end by a signal would: it hangs up, and says nothing.
    next->leave(json::object());
    ASSERT_EQ(::shutdown(held.get(), SHUT_RDWR), 0);
  }
  auto const third = meet();
  ASSERT_NE(third, nullptr);
  third->adopt();
  EXPECT_EQ(said_to(*third).value("shared", false), true);
  EXPECT_EQ(::kill(engine_, 0), 0);
}

TEST_F(an_engines_keeper, tells_all_who_are_there_how_the_engine_has_ended) {
  keep({"sh", "-c", "read line < /dev/null; exec sleep 1000"});
  auto const next = meet();
  ASSERT_NE(next, nullptr);
  ASSERT_EQ(::kill(engine_, SIGKILL), 0);
  EXPECT_EQ(said(), (json{{"type", "ended"}, {"text", "was ended by signal 9"}}));
  EXPECT_EQ(said_to(*next).value("text", ""), "was ended by signal 9");
}

TEST_F(an_engines_keeper, takes_orders_of_nobody_but_the_engines_server) {
  keep({"sleep", "1000"});
  auto const places = meeting_places(folder_, 0);
  ASSERT_EQ(places.size(), 1U);
  auto const stranger = engine_process::meet(places.front());
  ASSERT_NE(stranger, nullptr);
  memhandover::send_message(stranger->socket(), {{"type", "end"}});
  memhandover::send_message(stranger->socket(), {{"type", "stop"}});
  memhandover::send_message(stranger->socket(), {{"type", "adopt"}});
  say({{"type", "leave"}, {"notes", json::object()}});
  EXPECT_EQ(said_to(*stranger).value("type", ""), "yours") << "it lives, and all was read in turn";
}

TEST_F(an_engines_keeper, hangs_up_on_who_cannot_be_understood) {
  keep({"sleep", "1000"});
  auto const places = meeting_places(folder_, 0);
  ASSERT_EQ(places.size(), 1U);
  for (json const& what : {json{{"type", 7}}, json{{"type", "adopt"}, {"notes", 7}},
                           json::array({1, 2}), json("leave"), json{}}) {
    auto const stranger = engine_process::meet(places.front());
    ASSERT_NE(stranger, nullptr);
    memhandover::send_message(stranger->socket(), what);
    EXPECT_EQ(said_to(*stranger).value("type", ""), "ended") << what.dump();
  }
  say({{"type", "leave"}, {"notes", json::object()}});
  auto next = meet();
  ASSERT_NE(next, nullptr);
  next->adopt();
  EXPECT_EQ(said_to(*next).value("type", ""), "yours");
}

TEST_F(an_engines_keeper, that_was_killed_leaves_a_place_that_is_cleared_away) {
  keep({"sleep", "1000"});
  ASSERT_EQ(::kill(keeper_, SIGKILL), 0);
  ASSERT_EQ(::waitpid(keeper_, nullptr, 0), keeper_);
  keeper_ = 0;
  ASSERT_EQ(meeting_places(folder_, 0).size(), 1U);
  EXPECT_EQ(meet(), nullptr);
  EXPECT_TRUE(meeting_places(folder_, 0).empty());
  EXPECT_TRUE(meeting_places(folder_ / "none", 0).empty());
}

}  // namespace
}  // namespace sluice::server
