/// Which ranks a rank's sends and receives wait for.
#include "nccl_shim/exchanges.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>

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

constexpr std::array to_second{transfer{1, true}};
constexpr std::array from_first{transfer{0, false}};
constexpr std::array twice_from_first{transfer{0, false}, transfer{0, false}};

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
  EXPECT_THAT(first.lacks(std::array{transfer{0, true}, transfer{0, false}}).ranks, IsEmpty());
}

TEST_F(exchanges_test, places_are_known_when_all_have_told_theirs) {
  first.take_place(6);
  std::array const from_both{transfer{0, false}, transfer{1, false}};
  EXPECT_EQ(third.lacks(from_both).known_places(), 0U);
  second.take_place(1);
  EXPECT_EQ(third.lacks(from_both).known_places(), 0b100001U);
}

TEST_F(exchanges_test, a_rank_owes_what_others_have_made) {
  EXPECT_FALSE(second.owes());
  first.made(to_second);
  EXPECT_TRUE(second.owes());
  EXPECT_FALSE(first.owes() || third.owes());
  second.made(from_first);
  EXPECT_FALSE(second.owes());
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
  EXPECT_TRUE(first.owes());
  first.made(to_second);
  EXPECT_FALSE(first.owes());
}

}  // namespace
}  // namespace sluice::nccl_shim
