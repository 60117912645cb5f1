#include "memhandover/base/poll_list.hpp"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"

namespace sluice::memhandover {
namespace {

TEST(poll_list, waits_for_what_is_there_however_few_files_a_process_may_open) {
  unique_fd const bell{::eventfd(1, EFD_CLOEXEC)};
  auto const with_few = [&] {
    rlimit const few{24, 24};
    poll_list polled;
    (void)polled.add(-1);
    auto const bell_at = polled.add(bell.get());
    for (int i = 0; i < 100; ++i) {
      if (polled.ready(polled.add(-1))) {
        ::_exit(2);
      }
    }
    try {
      ::setrlimit(RLIMIT_NOFILE, &few);
      polled.wait(std::nullopt);
    } catch (error const&) {
      ::_exit(3);
    }
    ::_exit(polled.ready(bell_at) ? 0 : 4);
  };
  EXPECT_EXIT(with_few(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace sluice::memhandover
