/// A server that has joined and still opens its memory: the broker goes on writing the ledger until
/// the server says that it is ready, and whatever happens before harms nobody.

#include <gmock/gmock.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <future>
#include <memory>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/client/membership.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "tests/runtime/step/pool_fixture.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;
using namespace std::chrono_literals;
using memhandover::membership;
using memhandover::serving_pool;
using memhandover::unique_fd;
using testing::HasSubstr;

class starting_server_test : public pool_process_test {
 protected:
  /// A server that has joined; it opens nothing, and says that it is ready when the test does.
  [[nodiscard]] std::unique_ptr<membership> starting_server() const {
    memhandover::broker_options options;
    options.runtime_dir = folder_;
    return std::make_unique<membership>(options, memhandover::client_kind::server, "server", "");
  }
  /// Waits until the broker tells this server that.
  static void expect_told(membership& server, std::string const& type) {
    for (;;) {
      constexpr int patience_ms = 10'000;
      pollfd said{server.news(), POLLIN, 0};
      ASSERT_EQ(::poll(&said, 1, patience_ms), 1) << "the server has not been told: " << type;
      auto const received = server.receive();
      ASSERT_TRUE(received) << "the broker has gone";
      if (received->body["type"] == type) {
        return;
      }
    }
  }
  static void expect_appointed(membership& server) { expect_told(server, "appointed"); }
  [[nodiscard]] std::string writer() const { return status()["pool"]["writer"].get<std::string>(); }
  /// Jobs that die and jobs that ask are answered, by whoever writes.
  void expect_training_served() {
    auto job = trainer(1);
    EXPECT_EQ(job.line(), "committed");
    kill_and_see_free(job);
  }
  /// The pool's only job dies, and what it held comes free.
  void kill_and_see_free(child& job) {
    job.kill();
    await([this] { return status()["pool"]["training_bytes"] == 0; }, "a dead job's memory");
  }
  void find_another_broker(membership& server) {
    await([&] { return server.reconnect(); }, "the server to find another broker");
  }
  void kill_broker() {
    auto const broker = memhandover::broker_pid(folder_);
    ASSERT_GT(broker, 0);
    ASSERT_EQ(::kill(broker, SIGKILL), 0);
    await([&] { return memhandover::broker_pid(folder_) != broker; }, "the broker's end");
  }

  /// A server that has become the writer and died, but whose life pipe has not ended yet: the pipe's
  /// other end is on its way to whoever holds the returned socket, and belongs to no process.
  unique_fd dead_server_with_memory() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    unique_fd ours{ends[0]};
    unique_fd theirs{ends[1]};
    auto const pid = ::fork();
    if (pid == 0) {
      ours.reset();
      ::_exit(serve_and_die(theirs.get()));
    }
    int code = -1;
    EXPECT_EQ(::waitpid(pid, &code, 0), pid);
    EXPECT_EQ(code, 0) << "the first server has not been appointed";
    return ours;
  }

 private:
  int serve_and_die(int successor) const {
    auto const socket = memhandover::connect_to_broker(folder_);
    int ends[2];
    if (!socket || ::pipe(ends) != 0) {
      return 1;
    }
    memhandover::send_message(
        socket->get(),
        {{"type", "join"}, {"version", memhandover::protocol_version}, {"kind", "server"}},
        {ends[0]});
    memhandover::send_message(socket->get(), {{"type", "ready"}});
    while (auto const said = memhandover::receive_message(socket->get(), 10'000)) {
      if (said->body["type"] == "appointed") {
        memhandover::send_message(successor, {{"type", "pipe"}}, {ends[1]});
        return 0;
      }
    }
    return 2;
  }
};

TEST_F(starting_server_test, jobs_that_die_or_ask_do_not_wait_for_a_server_that_starts) {
  auto job = trainer(2);
  EXPECT_EQ(job.line(), "committed");
  auto const server = starting_server();
  kill_and_see_free(job);
  expect_training_served();
  EXPECT_EQ(writer(), "broker");
}

TEST_F(starting_server_test, it_becomes_the_writer_when_it_is_ready) {
  auto job = trainer();
  EXPECT_EQ(job.line(), "committed");
  auto const server = starting_server();
  EXPECT_EQ(writer(), "broker");
  server->say_ready();
  expect_appointed(*server);
  EXPECT_EQ(writer(), "server");
}

TEST_F(starting_server_test, one_that_ends_before_it_is_ready_leaves_the_broker_writing) {
  auto lasting = trainer();
  EXPECT_EQ(lasting.line(), "committed");
  starting_server().reset();
  await([this] { return status()["clients"].size() == 1; }, "its place to be free");
  EXPECT_EQ(writer(), "broker");
  auto next = server();
  expect_served(next);
  EXPECT_EQ(writer(), "server");
}

TEST_F(starting_server_test, of_two_that_start_at_once_the_second_is_refused) {
  auto const first = starting_server();
  try {
    auto const second = starting_server();
    ADD_FAILURE() << "there are two servers";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::already_exists);
    EXPECT_THAT(why.what(), HasSubstr(std::to_string(::getpid())));
  }
  first->say_ready();
  expect_appointed(*first);
}

TEST_F(starting_server_test, a_new_broker_writes_until_the_server_that_it_finds_is_ready) {
  auto lasting = trainer();
  EXPECT_EQ(lasting.line(), "committed");
  auto const server = starting_server();
  kill_broker();
  find_another_broker(*server);
  kill_and_see_free(lasting);
  expect_training_served();
  EXPECT_EQ(writer(), "broker");
  server->say_ready();
  expect_appointed(*server);
}

TEST_F(starting_server_test, one_that_was_named_but_not_told_is_told_by_the_next_broker) {
  auto lasting = trainer();
  EXPECT_EQ(lasting.line(), "committed");
  auto const server = starting_server();
  server->say_ready();
  await([this] { return writer() == "server"; }, "the appointment");
  kill_broker();  // what it has sent is lost with the connection
  find_another_broker(*server);
  EXPECT_EQ(writer(), "server");
  expect_appointed(*server);
}

TEST_F(starting_server_test, it_waits_until_what_its_predecessor_held_has_been_taken_back) {
  auto const kept = memhandover::open_pool({.runtime_dir = folder_});
  auto predecessor = dead_server_with_memory();
  auto const server = starting_server();
  server->say_ready();
  EXPECT_EQ(writer(), "broker");
  expect_training_served();
  EXPECT_EQ(writer(), "broker");
  predecessor.reset();
  expect_appointed(*server);
}

TEST_F(starting_server_test, it_hears_of_a_job_that_comes_back_after_the_appointment) {
  auto job = trainer();
  EXPECT_EQ(job.line(), "committed");
  auto const server = starting_server();
  job.hold();
  kill_broker();
  find_another_broker(*server);
  server->say_ready();
  expect_appointed(*server);
  ASSERT_EQ(::kill(job.pid(), SIGCONT), 0);
  expect_told(*server, "client_joined");
}

TEST_F(starting_server_test, one_that_becomes_ready_without_a_broker_is_appointed_by_the_next) {
  auto lasting = trainer();
  EXPECT_EQ(lasting.line(), "committed");
  auto const server = starting_server();
  kill_broker();
  EXPECT_FALSE(server->receive());
  EXPECT_FALSE(server->reconnect()) << "an attempt that does not know of it";
  server->say_ready();
  find_another_broker(*server);
  expect_appointed(*server);
}

TEST_F(starting_server_test, it_is_told_when_another_broker_has_been_found) {
  auto const server = starting_server();
  EXPECT_EQ(server->patience(), std::nullopt);
  kill_broker();
  EXPECT_FALSE(server->receive());
  EXPECT_EQ(server->patience(), 0ms) << "the first attempt begins at once";
  EXPECT_FALSE(server->reconnect());
  EXPECT_EQ(server->patience(), std::nullopt);
  pollfd news{server->news(), POLLIN, 0};
  ASSERT_EQ(::poll(&news, 1, 60'000), 1);
  EXPECT_TRUE(server->reconnect());
  EXPECT_TRUE(server->has_broker());
}

TEST_F(starting_server_test, one_that_waits_for_its_turn_is_appointed_by_the_next_broker) {
  auto lasting = trainer();
  EXPECT_EQ(lasting.line(), "committed");
  auto const predecessor = dead_server_with_memory();
  auto joining = std::async(std::launch::async,
                            [this] { return serving_pool::join({.runtime_dir = folder_}); });
  await([this] { return status()["clients"].size() == 3; }, "the server to join");
  EXPECT_EQ(writer(), "broker");
  kill_broker();
  auto const pool = joining.get();
  EXPECT_EQ(writer(), "server");
  auto const memory = pool->acquire(48_MiB, std::chrono::steady_clock::now() + 10s);
  EXPECT_GE(memory.bytes(), 48_MiB);
}

TEST_F(starting_server_test, one_whose_turn_does_not_come_gives_up_its_place) {
  auto const kept = memhandover::open_pool({.runtime_dir = folder_});
  auto const predecessor = dead_server_with_memory();
  try {
    (void)serving_pool::join({.runtime_dir = folder_, .patience = 100ms});
    ADD_FAILURE() << "it was appointed before what its predecessor held had been taken back";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::unavailable);
    EXPECT_THAT(why.what(), HasSubstr("within 100 ms"));
  }
  await([this] { return status()["clients"].size() == 1; }, "its place to be free");
  EXPECT_EQ(writer(), "broker");
}

}  // namespace
}  // namespace sluice::test
