/// Ranks that join at the same time meet in one file, whatever the others take for left over.
#include "nccl_shim/agreement/rank_group.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/nccl_shim/store_server.hpp"
#include "tests/runtime/gate/built_files.hpp"

namespace sluice::nccl_shim {
namespace {

class rank_group_test : public ::testing::Test {
 protected:
  rank_group_test() {
    std::string name = ::testing::TempDir() + "sluice-rank_group-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~rank_group_test() override { std::filesystem::remove_all(folder_); }

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
          auto const made = rank_group::join(folder_.string(), "key");
          together.arrive_and_wait();
          own.push_back(made->joined());
          together.arrive_and_wait();
        }
      });
    }
    all.clear();
    return found;
  }
  /// What lies in the file of those that are meeting.
  [[nodiscard]] std::unique_ptr<meeting, void (*)(meeting*)> opened() const {
    int const file = ::open((folder_ / "cut-key").c_str(), O_RDWR | O_CLOEXEC);
    void* const at = ::mmap(nullptr, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    return {static_cast<meeting*>(at), [](meeting* of) { ::munmap(of, sizeof(meeting)); }};
  }
  [[nodiscard]] std::filesystem::path const& folder() const { return folder_; }

 private:
  std::filesystem::path folder_;
};

TEST_F(rank_group_test, all_that_join_at_once_find_each_other) {
  EXPECT_THAT(found_by(8, 1000), ::testing::Each(::testing::Each(8)));
  EXPECT_TRUE(std::filesystem::is_empty(folder()));
}

TEST_F(rank_group_test, ranks_that_live_are_not_lost) {
  auto const first = rank_group::join(folder().string(), "key");
  auto const second = rank_group::join(folder().string(), "key");
  ASSERT_TRUE(first->complete(0, 2));
  ASSERT_TRUE(second->complete(1, 2));
  first->look_for_deaths();
  EXPECT_EQ(first->agreement().lost(), std::nullopt);
}

TEST_F(rank_group_test,
       a_rank_whose_pid_had_passed_to_another_process_before_it_was_looked_at_is_lost) {
  auto const first = rank_group::join(folder().string(), "key");
  auto const second = rank_group::join(folder().string(), "key");
  auto const file = opened();
  ASSERT_TRUE(first->complete(0, 2));
  ASSERT_TRUE(second->complete(1, 2));
  file->members[1].start_ticks.fetch_add(1);
  first->look_for_deaths();
  EXPECT_EQ(first->agreement().lost(), 1U);
}

/// Their pids say nothing to each other.
TEST_F(rank_group_test, ranks_in_namespaces_of_their_own_are_lost_when_they_end_and_have_not_left) {
  for (bool const leaves : {false, true}) {
    auto const first = rank_group::join(folder().string(), "key");
    auto second = rank_group::join(folder().string(), "key");
    auto const file = opened();
    ASSERT_TRUE(first->complete(0, 2));
    ASSERT_TRUE(second->complete(1, 2));
    file->members[1].pid_namespace.fetch_add(1);
    file->members[1].pid.store(std::numeric_limits<std::int32_t>::max());
    first->look_for_deaths();
    EXPECT_EQ(first->agreement().lost(), std::nullopt);
    second.reset();
    if (!leaves) {
      file->members[1].left.store(0);  // as one that is killed
    }
    first->look_for_deaths();
    EXPECT_EQ(first->agreement().lost(), leaves ? std::nullopt : std::optional{1U});
  }
}

TEST_F(rank_group_test, who_leaves_does_not_take_the_file_of_those_that_have_come_since) {
  auto first = rank_group::join(folder().string(), "key");
  auto second = rank_group::join(folder().string(), "key");
  ASSERT_TRUE(first->complete(0, 2));  // the file's name is free
  ASSERT_TRUE(second->complete(1, 2));
  auto const third = rank_group::join(folder().string(), "key");
  first.reset();
  second.reset();
  auto const fourth = rank_group::join(folder().string(), "key");
  EXPECT_EQ(third->joined(), 2);
  EXPECT_EQ(fourth->joined(), 2);
}

#ifdef SLUICE_WITH_TORCH

/// Ranks that are in folders of their own, as on several hosts, and have a store.
class rank_group_across_hosts : public rank_group_test {
 protected:
  [[nodiscard]] std::unique_ptr<store> connection() const {
    return store::open(gate::built(SLUICE_TORCH_PART "/libsluice_store.so"),
                       {"127.0.0.1", server_.port(), std::chrono::seconds{10}});
  }
  /// One that is the only one on its host.
  [[nodiscard]] std::unique_ptr<rank_group> join(store& across, std::string const& host) const {
    auto const own = folder() / host;
    std::filesystem::create_directories(own);
    return rank_group::join(own.string(), "key", &across);
  }
  /// What a counter of the communicator has come to.
  [[nodiscard]] static std::int64_t count(store& in, std::string const& counter) {
    return in.add("sluice/key/" + counter, 0).value_or(-1);
  }

 private:
  testing::store_server server_;
};

TEST_F(rank_group_across_hosts, all_that_join_agree_and_leave_nothing_behind) {
  auto const one = connection();
  auto const other = connection();
  auto first = join(*one, "a");
  auto second = join(*other, "b");
  ASSERT_TRUE(first->complete(0, 2));
  ASSERT_TRUE(second->complete(1, 2));
  first->agreement().need(true);
  first->agreement().arrive({1, 7, 100, 0});
  EXPECT_EQ(first->agreement().await(0), outcome::late);
  second->agreement().arrive({1, 7, 100, 0});
  EXPECT_EQ(first->agreement().await(0), outcome::granted);
  first.reset();
  EXPECT_EQ(count(*one, "joined"), 2);
  second.reset();
  for (char const* const counter : {"places", "joined", "left"}) {
    EXPECT_EQ(count(*one, counter), 0) << counter;
  }
}

TEST_F(rank_group_across_hosts, none_agrees_where_some_have_not_joined) {
  auto const one = connection();
  auto const other = connection();
  auto const first = join(*one, "a");
  auto const second = join(*other, "b");
  EXPECT_FALSE(first->complete(0, 3));
  EXPECT_FALSE(second->complete(1, 3));
  EXPECT_THAT(first->why_alone(3), ::testing::HasSubstr("2 of a communicator's 3 ranks"));
}

TEST_F(rank_group_across_hosts, a_store_that_goes_is_a_loss) {
  auto const one = connection();
  auto const other = connection();
  auto const first = join(*one, "a");
  auto const second = join(*other, "b");
  ASSERT_TRUE(first->complete(0, 2));
  ASSERT_TRUE(second->complete(1, 2));
  first->agreement().need(true);
  first->agreement().arrive({1, 7, 100, 0});
  one->retire();
  EXPECT_EQ(first->agreement().await(0), outcome::lost);
  EXPECT_EQ(first->agreement().lost(), the_words);
  EXPECT_EQ(first->loss(), one->name() + " is gone");
  EXPECT_EQ(first->agreement().pause(false), 0);
  first->agreement().resume();
}

#endif

}  // namespace
}  // namespace sluice::nccl_shim
