#include "memhandover/base/descriptor_limit.hpp"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdio>

#include "memhandover/base/error.hpp"
#include "memhandover/base/wire.hpp"

namespace sluice::memhandover {
namespace {

/// Runs `body` in a child with these limits, and ends the child: 0, or 3 with the error's text.
template <typename Body>
[[noreturn]] void with_limits(rlim_t soft, rlim_t hard, Body&& body) {
  rlimit const limit{soft, hard};
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    ::_exit(9);
  }
  try {
    body();
  } catch (error const& why) {
    std::fprintf(stderr, "%s\n", why.what());
    ::_exit(3);
  }
  ::_exit(0);
}

rlim_t soft_limit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}

TEST(descriptor_limit, leaves_the_process_as_many_as_before) {
  EXPECT_EXIT(with_limits(500, 4000,
                          [] {
                            make_room_for_descriptors(1000);
                            if (soft_limit() != 1500) {
                              throw error{error_kind::internal, std::to_string(soft_limit())};
                            }
                            make_room_for_descriptors(3500);
                            if (soft_limit() != 4000) {
                              throw error{error_kind::internal, std::to_string(soft_limit())};
                            }
                          }),
              testing::ExitedWithCode(0), "");
}

TEST(descriptor_limit, that_is_too_low_is_told_with_what_to_do) {
  EXPECT_EXIT(with_limits(500, 1000, [] { make_room_for_descriptors(990); }),
              testing::ExitedWithCode(3),
              "needs 990 open files.*may have 1000 .ulimit -Hn.; raise that limit, or make "
              "pool.chunk larger");
}

TEST(descriptor_limit, tells_whether_more_may_be_opened) {
  EXPECT_GE(descriptor_limit(), static_cast<std::size_t>(soft_limit()));
  auto const with_room_for_three = [] {
    rlim_t beyond = 0;  // others may be open between the lowest that are free
    {
      std::array<unique_fd, 3> opened;
      for (auto& each : opened) {
        each = unique_fd{::epoll_create1(EPOLL_CLOEXEC)};
        beyond = static_cast<rlim_t>(each.get()) + 1;
      }
    }
    with_limits(beyond, beyond, [] {
      if (!can_open(3) || !can_open(3) || can_open(4)) {
        throw error{error_kind::internal, "it counts wrongly"};
      }
    });
  };
  EXPECT_EXIT(with_room_for_three(), testing::ExitedWithCode(0), "");
}

TEST(descriptor_limit, that_cuts_a_message_short_is_told_as_such) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
  unique_fd const left{ends[0]};
  unique_fd const right{ends[1]};
  unique_fd const bell{::eventfd(0, EFD_CLOEXEC)};
  send_message(left.get(), {{"type", "bells"}}, std::vector<int>(5, bell.get()));
  auto const next = static_cast<rlim_t>(unique_fd{::dup(bell.get())}.get());
  EXPECT_EXIT(with_limits(next + 2, next + 2, [&] { (void)receive_message(right.get()); }),
              testing::ExitedWithCode(3), "may not open as many files");
}

}  // namespace
}  // namespace sluice::memhandover
