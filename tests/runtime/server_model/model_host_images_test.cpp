/// When a host makes the images that its models are loaded from. Where something was taken over:
/// tests/system/server_test.py.
#include <gtest/gtest.h>

#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

TEST_F(a_host, has_made_all_images_when_it_is_warmed_up) {
  auto& first = add(5);
  auto& second = add(7);
  first.set_image_steps(3);
  second.set_image_steps(4);
  start(8);
  EXPECT_TRUE(host_->warm_up());
  EXPECT_EQ(first.image_steps_made(), 3);
  EXPECT_EQ(second.image_steps_made(), 4);
  auto const seen = host_->snapshot();
  EXPECT_EQ(seen.models[0].image_bytes, model_bytes);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  EXPECT_EQ(second.image_steps_made(), 4);
}

TEST_F(a_host, throws_what_keeps_an_image_from_being_made_when_it_is_warmed_up) {
  auto& control = add(5);
  control.set_image_steps(3);
  control.fail_image(error_kind::unavailable);
  start(8);
  try {
    (void)host_->warm_up();
    ADD_FAILURE() << "it would be ready without the image";
  } catch (error const& thrown) {
    EXPECT_EQ(thrown.kind(), error_kind::unavailable);
  }
  EXPECT_EQ(control.image_steps_made(), 0) << "nothing but a cold start tries again";
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(control.image_steps_made(), 3);
}

TEST_F(a_host, answers_others_while_an_image_is_made_for_a_cold_start) {
  auto& slow = add(5);
  slow.set_image_steps(1'000'000'000);
  add(7);
  start(8);
  send(0, 1, 100);
  EXPECT_EQ(failure_of(ask(1, 1)), std::nullopt);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  EXPECT_EQ(host_->state(0), model_state::cold);
  slow.set_image_steps(0);
  EXPECT_EQ(answers_.wait_for(3).size(), 3U);
  EXPECT_EQ(host_->state(0), model_state::warm);
}

TEST_F(a_host, makes_no_further_images_once_the_start_is_given_up) {
  add(5).set_image_steps(3);
  add(7).set_image_steps(1'000'000'000);
  start(8);
  EXPECT_FALSE(host_->warm_up([this] { return controls_[0]->image_steps_made() == 3; }));
  EXPECT_TRUE(host_->stop(patience));
  EXPECT_LT(controls_[1]->image_steps_made(), 1'000'000'000);
}

}  // namespace
}  // namespace sluice::server::testing
