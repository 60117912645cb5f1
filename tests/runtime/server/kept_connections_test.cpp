#include "runtime/server/engines/kept_connections.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>
#include <vector>

namespace sluice::server {
namespace {

using memhandover::unique_fd;
using namespace std::chrono_literals;

/// Connections, of which the engine's ends stay here.
class kept_connections_test : public testing::Test {
 protected:
  /// A connection, whose other end is the last of `engine_ends_`.
  unique_fd connect() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    engine_ends_.emplace_back(ends[1]);
    return unique_fd{ends[0]};
  }
  /// Its number in `engine_ends_`.
  std::size_t keep_new(kept_connections& kept) {
    auto taken = kept.take(now_);
    EXPECT_FALSE(taken.socket);
    taken.socket = connect();
    kept.keep(std::move(taken), now_);
    return engine_ends_.size() - 1;
  }
  [[nodiscard]] bool is_closed(std::size_t which) const {
    char byte = 0;
    auto const came = ::recv(engine_ends_[which].get(), &byte, 1, MSG_DONTWAIT);
    return came == 0 || (came < 0 && errno == ECONNRESET);
  }

  std::vector<unique_fd> engine_ends_;
  kept_connections::clock::time_point now_ = kept_connections::clock::now();
};

TEST_F(kept_connections_test, what_was_used_last_is_used_next) {
  kept_connections kept{8};
  std::array<engine_connection, 2> taken{kept.take(now_), kept.take(now_)};
  std::array<int, 2> descriptors{};
  for (std::size_t i = 0; i < 2; ++i) {
    taken[i].socket = connect();
    descriptors[i] = taken[i].socket.get();
    kept.keep(std::move(taken[i]), now_);
  }
  EXPECT_EQ(kept.size(), 2U);
  EXPECT_EQ(kept.take(now_).socket.get(), descriptors[1]);
  EXPECT_EQ(kept.take(now_).socket.get(), descriptors[0]);
  EXPECT_FALSE(kept.take(now_).socket);
}

TEST_F(kept_connections_test, what_the_engine_has_closed_is_found_before_it_is_used) {
  kept_connections kept{8};
  auto const which = keep_new(kept);
  now_ += 100ms;
  engine_ends_[which].reset();
  EXPECT_FALSE(kept.take(now_).socket);
  EXPECT_EQ(kept.size(), 0U);
}

TEST_F(kept_connections_test, what_the_engine_has_said_something_on_is_not_used) {
  kept_connections kept{8};
  auto const which = keep_new(kept);
  ASSERT_EQ(::send(engine_ends_[which].get(), "H", 1, 0), 1);
  EXPECT_FALSE(kept.take(now_).socket);
  EXPECT_TRUE(is_closed(which));
}

TEST_F(kept_connections_test, beyond_the_bound_the_one_that_was_used_longest_ago_is_closed) {
  kept_connections kept{2};
  auto const run = kept.take(now_).run;
  for (int i = 0; i < 3; ++i) kept.keep({connect(), run}, now_);
  EXPECT_EQ(kept.size(), 2U);
  EXPECT_TRUE(is_closed(0));
  EXPECT_FALSE(is_closed(1));
}

TEST_F(kept_connections_test, none_are_kept_where_none_are_wanted) {
  kept_connections kept{0};
  (void)keep_new(kept);
  EXPECT_EQ(kept.size(), 0U);
  EXPECT_TRUE(is_closed(0));
}

TEST_F(kept_connections_test, those_whose_time_is_over_are_closed) {
  kept_connections kept{8};
  EXPECT_EQ(kept.next_end(), std::nullopt);
  (void)keep_new(kept);
  auto const end = now_ + kept_connections::longest_idle;
  EXPECT_EQ(kept.next_end(), end);
  kept.close_old(end - 1ms);
  EXPECT_EQ(kept.size(), 1U);
  kept.close_old(end);
  EXPECT_EQ(kept.size(), 0U);
  EXPECT_TRUE(is_closed(0));
  (void)keep_new(kept);
  now_ += kept_connections::longest_idle;
  EXPECT_FALSE(kept.take(now_).socket);  // before anybody has closed it
}

TEST_F(kept_connections_test, those_of_before_a_drop_are_not_kept_when_they_come_back) {
  kept_connections kept{8};
  (void)keep_new(kept);
  auto in_use = kept.take(now_);
  (void)keep_new(kept);
  kept.drop();
  EXPECT_TRUE(is_closed(1));
  EXPECT_FALSE(is_closed(0));
  kept.keep(std::move(in_use), now_);
  EXPECT_EQ(kept.size(), 0U);
  (void)keep_new(kept);
  EXPECT_EQ(kept.size(), 1U);
}

TEST_F(kept_connections_test,
       of_an_engine_that_closes_them_early_they_stay_less_long_until_it_ends) {
  kept_connections kept{8};
  auto const which = keep_new(kept);
  now_ += 2200ms;
  engine_ends_[which].reset();  // somewhere before
  EXPECT_FALSE(kept.take(now_).socket);
  (void)keep_new(kept);
  EXPECT_EQ(kept.next_end(), now_ + 1100ms);
  kept.drop();
  (void)keep_new(kept);
  EXPECT_EQ(kept.next_end(), now_ + kept_connections::longest_idle);
}

}  // namespace
}  // namespace sluice::server
