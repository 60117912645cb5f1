/// Which ranks a rank's sends and receives wait for.
#include "nccl_shim/agreement/exchanges.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace sluice::nccl_shim {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class exchanges_test : public ::testing::Test {
 protected:
  std::unique_ptr<exchange_memory> memory = std::make_unique<exchange_memory>();
  exchanges first{*memory, 0, 3};
  exchanges second{*memory, 1, 3};
  exchanges third{*memory, 2, 3};
};

constexpr std::array to_second{transfers{1, 1, 0}};
constexpr std::array from_first{transfers{0, 0, 1}};
constexpr std::array twice_from_first{transfers{0, 0, 2}};

TEST_F(exchanges_test, a_send_waits_for_its_receive_and_not_for_an_earlier_one) {
  EXPECT_THAT(first.lacks(to_second).ranks, ElementsAre(1));
  second.made(from_first);
  EXPECT_THAT(first.lacks(to_second).ranks, IsEmpty());
  first.made(to_second);
  EXPECT_THAT(first.lacks(to_second).ranks, ElementsAre(1));
}

TEST_F(exchanges_test, a_group_waits_until_all_of_it_has_its_other_end) {
  first.made(to_second);
  EXPECT_THAT(second.lacks(from_first).ranks, IsEmpty());
  EXPECT_THAT(second.lacks(twice_from_first).ranks, ElementsAre(0));
  first.made(to_second);
  EXPECT_THAT(second.lacks(twice_from_first).ranks, IsEmpty());
}

TEST_F(exchanges_test, who_sends_to_itself_waits_for_nobody) {
  EXPECT_THAT(first.lacks(std::array{transfers{0, 1, 1}}).ranks, IsEmpty());
}

TEST_F(exchanges_test, what_goes_to_nobody_of_its_communicator_is_left_to_nccl_to_refuse) {
  constexpr std::array to_nobody{transfers{3, 1, 0}, transfers{0xffffffff, 1, 0}};
  EXPECT_THAT(first.lacks(to_nobody).ranks, IsEmpty());
  first.made(to_nobody);
  EXPECT_FALSE(first.lags() || second.lags() || third.lags());
}

TEST_F(exchanges_test, what_is_added_up_has_each_rank_once) {
  std::vector<transfers> all;
  for (transfers const& each : {transfers{2, 1, 0}, transfers{0, 0, 1}, transfers{2, 1, 3}}) {
    add(all, each);
  }
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].peer, 0U);
  EXPECT_EQ(all[1].peer, 2U);
  EXPECT_EQ(all[1].sends, 2U);
  EXPECT_EQ(all[1].receives, 3U);
}

TEST_F(exchanges_test, places_are_known_when_all_have_told_theirs) {
  first.take_place(6);
  constexpr std::array from_both{transfers{0, 0, 1}, transfers{1, 0, 1}};
  EXPECT_EQ(third.lacks(from_both).known_places(), 0U);
  second.take_place(1);
  EXPECT_EQ(third.lacks(from_both).known_places(), 0b100001U);
}

TEST_F(exchanges_test, a_rank_owes_what_others_have_made) {
  EXPECT_FALSE(second.lags());
  first.made(to_second);
  EXPECT_TRUE(second.lags());
  EXPECT_FALSE(first.lags() || third.lags());
  second.made(from_first);
  EXPECT_FALSE(second.lags());
}

TEST_F(exchanges_test, others_know_who_passes) {
  first.begin_passing();
  EXPECT_TRUE(second.others_are_passing());
  EXPECT_FALSE(first.others_are_passing());
  first.end_passing();
  EXPECT_FALSE(second.others_are_passing());
}

TEST_F(exchanges_test, counts_may_begin_again) {
  constexpr std::uint64_t last = 0xffffffff;
  memory->ranks[0].made[1] = last << 32U;  // sends of the first
  memory->ranks[1].made[0] = last;         // receives of the second
  EXPECT_THAT(first.lacks(to_second).ranks, ElementsAre(1));
  second.made(from_first);
  EXPECT_EQ(memory->ranks[1].made[0], 0U);  // its sends are as they were
  EXPECT_THAT(first.lacks(to_second).ranks, IsEmpty());
  EXPECT_TRUE(first.lags());
  first.made(to_second);
  EXPECT_FALSE(first.lags());
}

}  // namespace
}  // namespace sluice::nccl_shim
