#include "memhandover/base/wire.hpp"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>

#include "memhandover/base/error.hpp"
#include "memhandover/base/standard_streams.hpp"

namespace sluice::memhandover {
namespace {

namespace fs = std::filesystem;

void send_text(unique_fd const& socket, char const* text) {
  (void)::send(socket.get(), text, std::strlen(text), MSG_DONTWAIT);
}

/// Signals that interrupt what this thread waits in, one a millisecond; after two seconds of them it calls for
/// help.
class interruptions {
 public:
  explicit interruptions(std::function<void()> help) {
    count_ = 0;
    help_ = std::move(help);
    struct sigaction action {};
    action.sa_handler = [](int) {
      if (++count_ == 2000) {
        help_();
      }
    };
    ::sigaction(SIGALRM, &action, &before_);  // without SA_RESTART
    itimerval const every{{0, 1000}, {0, 1000}};
    ::setitimer(ITIMER_REAL, &every, nullptr);
  }
  interruptions(interruptions const&) = delete;
  interruptions& operator=(interruptions const&) = delete;
  ~interruptions() {
    itimerval const never{};
    ::setitimer(ITIMER_REAL, &never, nullptr);
    ::sigaction(SIGALRM, &before_, nullptr);
  }
  [[nodiscard]] int count() const { return count_; }

 private:
  static inline std::atomic<int> count_;
  static inline std::function<void()> help_;
  struct sigaction before_ {};
};

class wire_test : public testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    left_ = unique_fd{ends[0]};
    right_ = unique_fd{ends[1]};
    auto pattern = (fs::temp_directory_path() / "sluice-wire-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  unique_fd left_;
  unique_fd right_;
  fs::path folder_;
};

TEST_F(wire_test, carries_a_message_with_its_descriptors) {
  unique_fd const bell{::eventfd(0, EFD_CLOEXEC)};
  send_message(left_.get(), {{"type", "bell"}, {"slot", 3}}, {bell.get(), bell.get()});
  auto const received = receive_message(right_.get());
  ASSERT_TRUE(received);
  EXPECT_EQ(received->body["slot"], 3);
  ASSERT_EQ(received->descriptors.size(), 2U);
  EXPECT_NE(::fcntl(received->descriptors[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  ASSERT_EQ(::eventfd_write(bell.get(), 5), 0);
  eventfd_t value = 0;
  ASSERT_EQ(::eventfd_read(received->descriptors[1].get(), &value), 0);
  EXPECT_EQ(value, 5U);
}

TEST_F(wire_test, tells_the_end_of_a_conversation_from_a_message) {
  left_.reset();
  EXPECT_FALSE(receive_message(right_.get()));
}

TEST_F(wire_test, hears_what_a_peer_has_said_that_went_without_listening) {
  send_message(left_.get(), {{"type", "question"}});
  send_message(right_.get(), {{"type", "error"}});
  right_.reset();
  auto const said = receive_message(left_.get());
  ASSERT_TRUE(said);
  EXPECT_EQ(said->body["type"], "error");
  EXPECT_FALSE(receive_message(left_.get()));
}

TEST_F(wire_test, refuses_what_is_no_message_of_ours) {
  for (std::string const text : {"nonsense", "[1,2]", "{}", R"({"type":7})", "{\"type\":\"x\""}) {
    ASSERT_EQ(::send(left_.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    EXPECT_THROW((void)receive_message(right_.get()), error) << text;
  }
}

TEST_F(wire_test, carries_a_text_that_is_not_utf_8_with_its_bytes_replaced) {
  send_message(left_.get(), {{"type", "x"}, {"name", "M\xfcller"}});
  auto const received = receive_message(right_.get());
  ASSERT_TRUE(received);
  EXPECT_EQ(received->body["name"], "M\uFFFDller");
}

TEST_F(wire_test, refuses_to_send_more_than_a_message_carries) {
  unique_fd const bell{::eventfd(0, EFD_CLOEXEC)};
  std::vector<int> const descriptors(max_descriptors + 1, bell.get());
  EXPECT_THROW(send_message(left_.get(), {{"type", "x"}}, descriptors), error);
  EXPECT_THROW(send_message(left_.get(), {{"type", "x"}, {"text", std::string(200'000, 'x')}}),
               error);
  send_message(left_.get(), {{"type", "x"}}, {descriptors.begin(), descriptors.end() - 1});
  EXPECT_EQ(receive_message(right_.get())->descriptors.size(), max_descriptors);
}

TEST_F(wire_test, gives_up_when_nothing_comes_in_time) {
  try {
    (void)receive_message(right_.get(), 1);
    FAIL();
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::unavailable);
  }
}

TEST_F(wire_test, a_peer_that_is_gone_is_an_error_and_no_signal) {
  right_.reset();
  EXPECT_THROW(send_message(left_.get(), {{"type", "x"}}), error);
}

TEST_F(wire_test, keeps_its_deadline_whatever_signals_come) {
  // Were it missed, a message would come after a while, and not end the test for ever.
  interruptions const signals{[this] { send_text(left_, R"({"type":"late"})"); }};
  try {
    auto const received = receive_message(right_.get(), 50);
    FAIL() << "waited until there was a message";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::unavailable) << why.what();
  }
  EXPECT_GT(signals.count(), 0);
}

TEST_F(wire_test, does_not_wait_for_ever_for_one_who_takes_nothing) {
  try {
    for (;;) {
      send_message(left_.get(), {{"type", "x"}, {"text", std::string(50'000, 'x')}});
    }
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::unavailable);
    EXPECT_STREQ(why.what(), "the other side of the pool's socket has taken nothing for 2000 ms");
  }
}

TEST_F(wire_test, gives_descriptors_numbers_beside_the_standard_streams) {
  unique_fd const bell{::eventfd(0, EFD_CLOEXEC)};
  send_message(left_.get(), {{"type", "bells"}}, {bell.get(), bell.get()});
  auto const in_child = [&] {
    ::close(STDIN_FILENO);
    ::close(STDOUT_FILENO);
    auto const received = receive_message(right_.get());
    auto const [reading, writing] = make_pipe("a test");
    auto const least = std::min({received->descriptors[0].get(), received->descriptors[1].get(),
                                 reading.get(), writing.get()});
    ::_exit(received->descriptors.size() == 2 ? least : 100);
  };
  EXPECT_EXIT(
      in_child(),
      [](int status) { return WEXITSTATUS(status) > STDERR_FILENO && WEXITSTATUS(status) < 100; },
      "");
}

TEST(standard_streams, that_are_closed_are_taken_until_the_next_program) {
  auto const in_child = [] {
    ::close(STDIN_FILENO);
    ::close(STDOUT_FILENO);
    occupy_standard_streams();
    for (int const stream : {STDIN_FILENO, STDOUT_FILENO}) {
      if ((::fcntl(stream, F_GETFD) & FD_CLOEXEC) == 0) {
        ::_exit(1);
      }
    }
    // What was open stays open there.
    ::_exit((::fcntl(STDERR_FILENO, F_GETFD) & FD_CLOEXEC) == 0 ? 0 : 2);
  };
  EXPECT_EXIT(in_child(), testing::ExitedWithCode(0), "");
}

TEST_F(wire_test, finds_no_broker_where_none_listens) {
  EXPECT_FALSE(connect_to_broker(folder_.string()));
}

TEST_F(wire_test, names_a_process_by_its_start) {
  EXPECT_GT(process_start_ticks(::getpid()), 0U);
  EXPECT_EQ(process_start_ticks(::getpid()), process_start_ticks(::getpid()));
  EXPECT_EQ(process_start_ticks(0x7fffffff), 0U);
}

}  // namespace
}  // namespace sluice::memhandover
