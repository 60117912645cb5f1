/// Ranks that join at the same time meet in one file, whatever the others take for left over.
#include "nccl_shim/membership.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace sluice::nccl_shim {
namespace {

class membership_test : public ::testing::Test {
 protected:
  membership_test() {
    std::string name = ::testing::TempDir() + "sluice-membership-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~membership_test() override { std::filesystem::remove_all(folder_); }

  /// How many each of so many ranks finds, which join again and again, all at once.
  [[nodiscard]] std::vector<std::vector<unsigned>> found_by(std::size_t ranks, int rounds) const {
    std::vector<std::vector<unsigned>> found(ranks);
    std::barrier together{static_cast<std::ptrdiff_t>(ranks)};
    std::vector<std::jthread> all;
    all.reserve(ranks);
    for (auto& own : found) {
      all.emplace_back([&, this] {
        for (int round = 0; round < rounds; ++round) {
          together.arrive_and_wait();
          auto const made = membership::join(folder_.string(), "key");
          together.arrive_and_wait();
          own.push_back(made->joined());
          together.arrive_and_wait();
        }
      });
    }
    all.clear();
    return found;
  }
  [[nodiscard]] std::filesystem::path const& folder() const { return folder_; }

 private:
  std::filesystem::path folder_;
};

TEST_F(membership_test, all_that_join_at_once_find_each_other) {
  EXPECT_THAT(found_by(8, 1000), ::testing::Each(::testing::Each(8)));
  EXPECT_TRUE(std::filesystem::is_empty(folder()));
}

TEST_F(membership_test, who_leaves_does_not_take_the_file_of_those_that_have_come_since) {
  auto first = membership::join(folder().string(), "key");
  auto second = membership::join(folder().string(), "key");
  ASSERT_TRUE(first->complete(0, 2));  // the file's name is free
  ASSERT_TRUE(second->complete(1, 2));
  auto const third = membership::join(folder().string(), "key");
  first.reset();
  second.reset();
  auto const fourth = membership::join(folder().string(), "key");
  EXPECT_EQ(third->joined(), 2);
  EXPECT_EQ(fourth->joined(), 2);
}

}  // namespace
}  // namespace sluice::nccl_shim
