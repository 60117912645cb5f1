#include <gtest/gtest.h>

#include "runtime/server/executor/detail/pending_requests.hpp"
#include "runtime/server/executor/model_health.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using detail::pending_request;
using detail::pending_requests;

std::chrono::steady_clock::time_point at(std::chrono::steady_clock::duration after) {
  return std::chrono::steady_clock::time_point{1h} + after;
}

pending_request request_of(std::size_t model, std::chrono::steady_clock::time_point deadline) {
  return {model, {}, "", [](infer_result) {}, at(0s), deadline};
}

TEST(pending_requests, are_taken_once_by_their_tickets) {
  pending_requests pending{2};
  pending.add(1, request_of(0, at(9s)));
  pending.add(2, request_of(1, at(3s)));
  EXPECT_EQ(pending.tickets(), (std::vector<request_ticket>{1, 2}));
  EXPECT_EQ(pending.next_deadline(), at(3s));
  EXPECT_EQ(pending.take(2)->model, 1U);
  EXPECT_FALSE(pending.take(2));
  EXPECT_EQ(pending.find(2), nullptr);
  EXPECT_EQ(pending.next_deadline(), at(9s));
  EXPECT_EQ(pending.counts(0).waiting, 1U);
  EXPECT_EQ(pending.counts(1).waiting, 0U);
}

TEST(pending_requests, that_are_late_come_out_and_no_others) {
  pending_requests pending{1};
  pending.add(1, request_of(0, at(3s)));
  pending.add(2, request_of(0, at(1s)));
  pending.add(3, request_of(0, at(2s)));
  auto const late = pending.take_late(at(2s));
  ASSERT_EQ(late.size(), 2U);
  EXPECT_EQ(late[0].first, 2U);
  EXPECT_EQ(late[1].first, 3U);
  EXPECT_TRUE(pending.take_late(at(2s)).empty());
  EXPECT_EQ(pending.tickets(), (std::vector<request_ticket>{1}));
}

TEST(pending_requests, are_told_of_once_when_they_do_not_wait_any_more) {
  std::vector<std::pair<std::size_t, request_ticket>> gone;
  pending_requests pending{
      2, [&](std::size_t model, request_ticket which) { gone.emplace_back(model, which); }};
  for (request_ticket ticket = 1; ticket <= 6; ++ticket) {
    pending.add(ticket, request_of(ticket % 2, at(1s * ticket)));
  }
  (void)pending.take(4);
  (void)pending.take(4);
  (void)pending.take_late(at(2s));
  (void)pending.take_all_of(1);
  (void)pending.take_all();
  EXPECT_EQ(gone, (std::vector<std::pair<std::size_t, request_ticket>>{
                      {0, 4}, {1, 1}, {0, 2}, {1, 3}, {1, 5}, {0, 6}}));
}

TEST(pending_requests, of_a_model_come_out_in_order_and_are_counted) {
  pending_requests pending{2};
  for (request_ticket ticket = 1; ticket < 6; ++ticket) {
    pending.add(ticket, request_of(ticket % 2, at(1s * ticket)));
  }
  auto const taken = pending.take_all_of(1);
  ASSERT_EQ(taken.size(), 3U);
  EXPECT_LT(taken[0].deadline, taken[2].deadline);
  error const failure{error_kind::cancelled, "gone"};
  pending.on_answer(1, &failure);
  pending.on_answer(1, nullptr);
  pending.on_refusal(0);
  pending.on_refusal(1, true);
  EXPECT_EQ(pending.total().requests, 7U);
  EXPECT_EQ(pending.total().failed, 3U);
  EXPECT_EQ(pending.counts(1).refused, 1U);
  EXPECT_EQ(pending.total().refused, 1U);
  EXPECT_EQ(pending.total().cancelled, 1U);
  EXPECT_EQ(pending.total().waiting, 2U);
  EXPECT_EQ(pending.take_all().size(), 2U);
  EXPECT_TRUE(pending.empty());
  EXPECT_FALSE(pending.next_deadline());
}

TEST(model_health, fails_with_the_third_offence_in_five_minutes) {
  model_health health;
  health.on_offence(at(0s));
  health.on_offence(at(1s));
  EXPECT_EQ(health.failed_for(at(1s)), 0s);
  health.on_offence(at(2s));
  EXPECT_EQ(health.failed_for(at(2s)), 1s);
  EXPECT_EQ(health.failed_for(at(3s)), 0s);
  EXPECT_EQ(health.offences(), 3U);
}

TEST(model_health, forgets_offences_of_long_ago) {
  model_health health;
  for (int i = 0; i < 20; ++i) {
    health.on_offence(at(3min * i));
    EXPECT_EQ(health.failed_for(at(3min * i)), 0s);
  }
}

TEST(model_health, waits_twice_as_long_each_time_and_anew_after_an_answer) {
  model_health health;
  auto now = at(0s);
  for (int i = 0; i < 3; ++i) {
    health.on_offence(now);
  }
  for (auto const expected : {2s, 4s, 8s}) {
    now += health.failed_for(now);
    health.on_offence(now);
    EXPECT_EQ(health.failed_for(now), expected);
  }
  for (int i = 0; i < 20; ++i) {
    now += health.failed_for(now);
    health.on_offence(now);
  }
  EXPECT_EQ(health.failed_for(now), model_health::longest_back_off);
  now += health.failed_for(now);
  health.on_answer();
  health.on_offence(now);
  EXPECT_EQ(health.failed_for(now), 0s);
}

}  // namespace
}  // namespace sluice::server::testing
