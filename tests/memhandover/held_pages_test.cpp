#include "memhandover/device/held_pages.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

class held_pages_test : public testing::Test {
 protected:
  static constexpr std::size_t bytes = 256_KiB;

  void SetUp() override {
    try {
      pages_.emplace();
    } catch (error const& why) {
      GTEST_SKIP() << why.what();
    }
    where_ = static_cast<std::byte*>(
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(where_, MAP_FAILED);
    std::memset(where_, 7, bytes);
  }
  void TearDown() override {
    if (where_ != nullptr) {
      ::munmap(where_, bytes);
    }
  }

  static bool all_are(std::byte const* at, int value) {
    return std::all_of(at, at + bytes,
                       [value](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }
  void await_touch() {
    auto const end = std::chrono::steady_clock::now() + std::chrono::seconds{60};
    while (!pages_->touched()) {
      ASSERT_LT(std::chrono::steady_clock::now(), end);
      std::this_thread::yield();
    }
  }

  std::optional<held_pages> pages_;
  std::byte* where_ = nullptr;
};

TEST_F(held_pages_test, contents_lie_aside_and_who_touches_waits_until_they_are_back) {
  auto* const aside = pages_->take(where_, bytes);
  EXPECT_TRUE(all_are(aside, 7));
  EXPECT_FALSE(pages_->touched());
  std::atomic<int> seen{-1};
  std::thread reader{[&] { seen = static_cast<int>(where_[bytes - 1]); }};
  await_touch();
  EXPECT_EQ(seen, -1);
  EXPECT_FALSE(pages_->touched()) << "it has been told";
  pages_->put(where_, aside, bytes);
  reader.join();
  EXPECT_EQ(seen, 7);
  pages_->release(where_, bytes);
  pages_->drop(aside, bytes);
  EXPECT_TRUE(all_are(where_, 7));
}

TEST_F(held_pages_test, a_call_of_the_system_waits_as_well) {
  auto* const aside = pages_->take(where_, bytes);
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  ASSERT_EQ(::write(ends[1], "new", 3), 3);
  std::thread reader{[&] { EXPECT_EQ(::read(ends[0], where_, 3), 3); }};
  await_touch();
  pages_->put(where_, aside, bytes);
  reader.join();
  EXPECT_EQ(std::memcmp(where_, "new", 3), 0);
  pages_->release(where_, bytes);
  pages_->drop(aside, bytes);
  EXPECT_EQ(where_[3], std::byte{7});
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_F(held_pages_test, what_is_released_without_contents_is_zero) {
  pages_->drop(pages_->take(where_, bytes), bytes);
  std::atomic<int> seen{-1};
  std::thread reader{[&] { seen = static_cast<int>(where_[0]); }};
  await_touch();
  pages_->release(where_, bytes);
  reader.join();
  EXPECT_EQ(seen, 0);
  EXPECT_TRUE(all_are(where_, 0));
}

TEST_F(held_pages_test, no_write_of_a_thread_that_goes_on_writing_is_lost) {
  constexpr int rounds = 200;
  std::atomic<bool> ends{false};
  std::uint64_t written = 0;
  auto* const counter = reinterpret_cast<std::uint64_t volatile*>(where_ + 4096);
  *counter = 0;
  std::thread writer{[&] {
    while (!ends) {
      *counter = *counter + 1;
      ++written;
    }
  }};
  std::vector<std::byte> copy(bytes);
  for (int i = 0; i < rounds; ++i) {
    auto* const aside = pages_->take(where_, bytes);
    std::memcpy(copy.data(), aside, bytes);
    pages_->drop(aside, bytes);
    pages_->put(where_, copy.data(), bytes);
    pages_->release(where_, bytes);
  }
  ends = true;
  writer.join();
  EXPECT_EQ(*counter, written);
}

TEST_F(held_pages_test, its_end_lets_everybody_go_on) {
  pages_->drop(pages_->take(where_, bytes), bytes);
  std::thread reader{[&] { EXPECT_EQ(where_[0], std::byte{0}); }};
  await_touch();
  pages_.reset();
  reader.join();
}

TEST_F(held_pages_test, memory_that_is_not_private_is_refused_and_stays) {
  auto* const shared = static_cast<std::byte*>(
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::memset(shared, 3, bytes);
  ::mprotect(shared + bytes / 2, bytes / 2, PROT_READ);  // two mappings are moved by no call
  EXPECT_THROW((void)pages_->take(shared, bytes), error);
  EXPECT_TRUE(all_are(shared, 3));
  ::munmap(shared, bytes);
}

}  // namespace
}  // namespace sluice::memhandover
