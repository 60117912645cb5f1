#include "posix/byte_locks.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <memory>
#include <string>

namespace sluice::posix {
namespace {

class byte_locks : public ::testing::Test {
 protected:
  byte_locks() : file_{std::tmpfile(), &std::fclose} {}

  [[nodiscard]] int one() const { return ::fileno(file_.get()); }
  /// Another description of the file.
  [[nodiscard]] int open_again() const {
    return ::open(("/proc/self/fd/" + std::to_string(one())).c_str(), O_RDWR | O_CLOEXEC);
  }

 private:
  std::unique_ptr<FILE, int (*)(FILE*)> file_;
};

TEST_F(byte_locks, a_byte_is_that_of_one_description_until_it_is_closed) {
  int const other = open_again();
  EXPECT_FALSE(is_byte_locked(other, 3));
  ASSERT_TRUE(lock_byte(one(), 3));
  EXPECT_TRUE(lock_byte(one(), 3));  // it has it
  EXPECT_FALSE(is_byte_locked(one(), 3));
  EXPECT_TRUE(is_byte_locked(other, 3));
  EXPECT_FALSE(lock_byte(other, 3));
  EXPECT_TRUE(lock_byte(other, 4));
  EXPECT_TRUE(is_byte_locked(one(), 4));
  ::close(other);
  EXPECT_FALSE(is_byte_locked(one(), 4));
}

TEST_F(byte_locks, a_forked_child_keeps_the_byte) {
  std::array<int, 2> end{};
  ASSERT_EQ(::pipe(end.data()), 0);
  int const locked = open_again();
  ASSERT_TRUE(lock_byte(locked, 0));
  pid_t const child = ::fork();
  if (child == 0) {
    ::close(end[1]);
    char byte = 0;
    static_cast<void>(::read(end[0], &byte, 1));  // until the parent closes it
    ::_exit(0);
  }
  ::close(locked);
  EXPECT_TRUE(is_byte_locked(one(), 0));
  ::close(end[1]);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(is_byte_locked(one(), 0));
  ::close(end[0]);
}

TEST_F(byte_locks, what_cannot_be_told_of_counts_as_locked) {
  EXPECT_FALSE(lock_byte(-1, 0));
  EXPECT_TRUE(is_byte_locked(-1, 0));
}

}  // namespace
}  // namespace sluice::posix
