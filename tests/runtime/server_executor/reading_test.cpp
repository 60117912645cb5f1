// Who reads: in the process the threads that compute what takes little time, in the server somebody else's thread.

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/executor/remote_executor.hpp"
#include "tests/runtime/server_executor/rogue_models.hpp"

namespace sluice::server::testing {
namespace {

using memhandover::unique_fd;

constexpr std::size_t sum_place = 0, rogue_place = 1;

/// With one thread, which watches one socket at a time, as many as come.
class watching_thread final : public socket_watcher {
 public:
  ~watching_thread() override { stop(); }

  bool watch(int socket, reader on_readable, std::function<void()> on_end) override {
    std::lock_guard const lock{mutex_};
    if (stopped_) {
      return false;
    }
    sockets_.push_back({memhandover::duplicate(socket), std::move(on_readable), std::move(on_end)});
    ++watched_;
    std::uint64_t const one = 1;
    return ::write(wake_.get(), &one, sizeof one) == sizeof one;
  }

  void stop() {
    {
      std::lock_guard const lock{mutex_};
      stopped_ = true;
    }
    std::uint64_t const one = 1;
    ASSERT_EQ(::write(wake_.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  [[nodiscard]] std::thread::id id() const { return id_; }
  [[nodiscard]] int watched() const { return watched_; }

 private:
  struct watched_socket {
    unique_fd socket;
    reader on_readable;
    std::function<void()> on_end;
  };

  void run() {
    std::deque<watched_socket> mine;
    for (;;) {
      std::array<pollfd, 2> waited{pollfd{mine.empty() ? -1 : mine.front().socket.get(), POLLIN, 0},
                                   pollfd{wake_.get(), POLLIN, 0}};
      (void)::poll(waited.data(), waited.size(), -1);
      if (waited[0].revents != 0 && !mine.front().on_readable(mine.front().socket.get())) {
        mine.front().on_end();
        mine.pop_front();
      }
      std::lock_guard const lock{mutex_};
      if (waited[1].revents != 0) {
        std::uint64_t count = 0;
        (void)!::read(wake_.get(), &count, sizeof count);
      }
      for (; !sockets_.empty(); sockets_.pop_front()) {
        mine.push_back(std::move(sockets_.front()));
      }
      if (stopped_) {
        break;
      }
    }
    for (auto& each : mine) {
      each.on_end();
    }
  }

  unique_fd const wake_{::eventfd(0, EFD_CLOEXEC)};
  std::mutex mutex_;  // guards what follows
  std::deque<watched_socket> sockets_;
  bool stopped_ = false;
  std::atomic<int> watched_ = 0;
  std::thread thread_{[this] { run(); }};
  std::thread::id const id_ = thread_.get_id();
};

class reading_of_a_remote_executor : public ::testing::Test {
 protected:
  void start(int computing_threads) {
    remote_executor::options options{
        .program =
            std::filesystem::read_symlink("/proc/self/exe").parent_path() / "sluice_test_executor",
        .first = {.settings = {{"computing_threads", computing_threads}},
                  .policy = {},
                  .models = {{"sum", "1"}, {"rogue", "1"}, {"other", "1"}}},
        .compute_limit = patience,
        .answer_limit = patience,
        .reader = &watcher_};
    executor_.emplace(std::move(options));
    ASSERT_TRUE(executor_->wait_until_ready());
  }

  void send(std::size_t model, std::int64_t value) {
    infer_request request;
    request.inputs.push_back(number("input", value));
    executor_->submit(model, std::move(request), [this, done = answers_.take(0)](auto result) {
      by_ = std::this_thread::get_id();
      done(std::move(result));
    });
    ++sent_;
  }
  infer_result ask(std::size_t model, std::int64_t value) {
    send(model, value);
    auto got = answers_.wait_for(sent_);
    return got.size() == sent_ ? got.back().second : error{error_kind::internal, "no answer came"};
  }

  std::atomic<std::thread::id> by_;
  std::size_t sent_ = 0;
  answers answers_;
  watching_thread watcher_;
  std::optional<remote_executor> executor_;
};

TEST_F(reading_of_a_remote_executor,
       is_done_by_who_was_asked_to_and_by_itself_where_that_one_has_stopped) {
  start(0);
  do {  // it is asked once the process serves
    EXPECT_EQ(sum_of(ask(sum_place, 3)), 13);
  } while (by_.load() != watcher_.id());
  EXPECT_EQ(executor_->status()["executor"]["started"], 1);
  watcher_.stop();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(sum_of(ask(sum_place, 4)), 14);
    EXPECT_NE(by_.load(), watcher_.id());
  }
  EXPECT_TRUE(executor_->stop(patience));
}

TEST_F(reading_of_a_remote_executor, is_done_of_each_process) {
  start(2);
  for (int process = 1; process <= 3; ++process) {
    do {
      EXPECT_EQ(sum_of(ask(sum_place, 3)), 13);
    } while (by_.load() != watcher_.id() && !::testing::Test::HasFailure());
    EXPECT_EQ(watcher_.watched(), process);
    auto const ended = process % 2 == 0 ? mischief::abort : mischief::end_without_a_word;
    EXPECT_EQ(failure_of(ask(rogue_place, static_cast<std::int64_t>(ended))), error_kind::aborted);
  }
  EXPECT_TRUE(std::holds_alternative<infer_response>(ask(sum_place, 3)));
}

/// A model that takes little time is computed by the thread that reads.
TEST_F(reading_of_a_remote_executor, goes_on_in_a_process_whose_reader_hangs_in_a_computation) {
  start(2);
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(sum_of(ask(sum_place, i)), 10 + i);
    ASSERT_TRUE(std::holds_alternative<infer_response>(ask(rogue_place, 7)));
  }
  send(rogue_place, static_cast<std::int64_t>(mischief::hang));
  std::set<std::int64_t> expected, seen;
  constexpr int few = 12;  // so that the host learns nothing of how models hinder each other
  for (int i = 0; i < few; ++i) {
    send(sum_place, 1000 + i);
    expected.insert(1010 + i);
  }
  auto const got = answers_.wait_for(200 + few);
  ASSERT_EQ(got.size(), 200U + few);
  for (auto each = got.begin() + 200; each != got.end(); ++each) {
    seen.insert(sum_of(each->second));
  }
  EXPECT_EQ(seen, expected);
  EXPECT_EQ(executor_->status()["models"][rogue_place]["computing"], 1) << "it hangs still";
}

}  // namespace
}  // namespace sluice::server::testing
