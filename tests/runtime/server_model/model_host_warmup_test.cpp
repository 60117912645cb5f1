/// Samples that a model computes before its first request.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

class a_host_with_samples : public a_host, public ::testing::WithParamInterface<std::size_t> {
 protected:
  a_host_with_samples() { options_.computing_threads = GetParam(); }

  /// Of the sum's one input, from `elements` on as a file has them.
  model_control& add_with_samples(std::uint32_t count) {
    auto& control = add(5);
    models_.back().warmup = {
        {.name = "zeros",
         .count = count,
         .inputs = {{.name = "input", .type = datatype::int64, .shape = {1}, .bytes = 8}}}};
    return control;
  }
};

INSTANTIATE_TEST_SUITE_P(, a_host_with_samples, ::testing::Values(0, 3));

TEST_P(a_host_with_samples, computes_them_before_it_is_warmed_up_and_counts_them_nowhere) {
  auto& control = add_with_samples(3);
  auto& other = add(7);
  start(8);
  EXPECT_TRUE(host_->warm_up());
  EXPECT_EQ(control.batches().size(), 3U);
  EXPECT_EQ(control.loads(), 1);
  EXPECT_EQ(other.loads(), 0);
  auto const seen = host_->snapshot();
  EXPECT_EQ(seen.requests, 0U);
  EXPECT_EQ(seen.failed, 0U);
  EXPECT_EQ(seen.in_flight, 0U);
  EXPECT_EQ(seen.models.at(0).requests, 0U);
  EXPECT_EQ(seen.warm.n + seen.cold.n, 0U);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(host_->snapshot().models.at(0).requests, 1U);
}

TEST_P(a_host_with_samples, serves_a_model_whose_samples_fail) {
  auto& control = add_with_samples(2);
  models_.back().warmup[0].inputs[0].data = warmup_input::source::file;
  models_.back().warmup[0].inputs[0].file = "/nowhere";
  auto& failing = add_with_samples(1);
  failing.fail_load(error_kind::internal);
  start(8);
  EXPECT_TRUE(host_->warm_up());
  EXPECT_TRUE(control.batches().empty());
  EXPECT_TRUE(failing.batches().empty());
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(sum_of(ask(1, 2)), 12);
  EXPECT_EQ(host_->snapshot().failed, 0U);
}

TEST_P(a_host_with_samples, gives_up_when_it_is_to_end) {
  add_with_samples(1).close();
  start(8);
  EXPECT_FALSE(host_->warm_up([] { return true; }));
}

}  // namespace
}  // namespace sluice::server::testing
