/// What a step says of wrong input, before it changes anything.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "tests/runtime/torch_step/small_training.hpp"

using namespace sluice::testing;
using sluice::step;
using sluice::step_options;

namespace {

/// What a std::invalid_argument says that `work` throws.
template <typename Work>
std::string complaint(Work&& work) {
  try {
    work();
  } catch (std::invalid_argument const& why) {
    return why.what();
  }
  return "nothing";
}

class torch_step_errors : public ::testing::Test {
 protected:
  std::string of_options(step_options options) {
    return complaint([&] { step{model_, optimizer_, std::move(options)}; });
  }
  std::string of_batch(step::tensors const& batch) {
    return complaint([&] { step{model_, optimizer_}(cross_entropy_of(model_), batch); });
  }
  /// `result_of` gets the mean loss of a slice, and which slice it is.
  template <typename Result>
  std::string of_loss(Result&& result_of, step_options options = {.micro_batch = 2}) {
    auto const before = weights_of(*model_);
    step step{model_, optimizer_, std::move(options)};
    int call = 0;
    auto loss_of = [&](auto const& slices) -> sluice::slice_loss {
      return result_of(F::cross_entropy(model_->forward(slices[0]), slices[1]), call++);
    };
    auto text = complaint([&] { step(loss_of, batch_of(4)); });
    EXPECT_TRUE(same_bits(weights_of(*model_), before));
    return text;
  }

  nn::Sequential model_ = mlp();
  torch::optim::SGD optimizer_ = sgd(*model_);
};

TEST_F(torch_step_errors, options) {
  EXPECT_EQ(of_options({.micro_batch = 0}), "micro_batch must be at least 1, not 0");
  EXPECT_THAT(of_options({.clip_norm = 0.0}),
              ::testing::HasSubstr("clip_norm must be more than 0"));
  EXPECT_THAT(of_options({.clip_norm = std::numeric_limits<double>::quiet_NaN()}),
              ::testing::HasSubstr("clip_norm"));
  EXPECT_EQ(of_options({.generators = {at::Generator{}}}), "a generator is undefined");
}

TEST_F(torch_step_errors, model) {
  nn::Sequential empty{nullptr};
  EXPECT_THAT(complaint([&] {
                step{empty, optimizer_};
              }),
              ::testing::HasSubstr("must not be null"));
  for (auto& param : model_->parameters()) {
    param.requires_grad_(false);
  }
  EXPECT_EQ(of_options({}), "the optimizer has no parameter that requires a gradient");
}

TEST_F(torch_step_errors, batch) {
  auto const least = "a step needs at least one tensor with at least one sample in dimension 0";
  EXPECT_EQ(of_batch({}), least);
  EXPECT_EQ(of_batch({torch::tensor(1.0F)}), least);
  EXPECT_EQ(of_batch({torch::empty({0, 5}), torch::empty({0})}), least);
  EXPECT_EQ(of_batch({torch::Tensor{}}), "a tensor of the batch is undefined");
  EXPECT_THAT(of_batch({torch::randn({4, 5}), torch::zeros({3}, torch::kLong)}),
              ::testing::HasSubstr("must agree in dimension 0 but have 4 and 3 samples"));
  EXPECT_THAT(of_batch({torch::randn({4, 5}), torch::zeros({0}, torch::kLong)}),
              ::testing::HasSubstr("must agree in dimension 0 but have 4 and 0 samples"));
}

TEST_F(torch_step_errors, loss) {
  auto const scalar = ::testing::HasSubstr("must be a scalar tensor of floating-point type");
  EXPECT_THAT(of_loss([](auto loss, int) { return loss.expand({2}); }), scalar);
  EXPECT_THAT(of_loss([](auto loss, int) { return loss.to(torch::kLong); }), scalar);
  EXPECT_THAT(of_loss([](auto, int) { return torch::Tensor{}; }), scalar);
  EXPECT_THAT(complaint([&] {
                step{model_, optimizer_}(nullptr, batch_of(2));
              }),
              ::testing::HasSubstr("loss function"));
}

TEST_F(torch_step_errors, weight) {
  auto const weighed = [](auto weight) {
    return [weight](auto loss, int) { return std::pair{loss, weight}; };
  };
  auto const finite = ::testing::HasSubstr("must be finite and not negative");
  EXPECT_THAT(of_loss(weighed(-1)), finite);
  EXPECT_THAT(of_loss(weighed(torch::tensor(-1))), finite);
  EXPECT_THAT(of_loss(weighed(std::numeric_limits<double>::infinity())), finite);
  EXPECT_THAT(of_loss(weighed(torch::ones({2}))),
              ::testing::HasSubstr("a number or a scalar tensor"));
  EXPECT_EQ(of_loss(weighed(0)), "the weights of a batch's slices must not all be zero");
  EXPECT_THAT(of_loss(weighed(1), {.reduction = sluice::reduction::sum}),
              ::testing::HasSubstr("weights belong to means"));
  EXPECT_EQ(of_loss([](auto loss, int call) {
              return call == 0 ? sluice::slice_loss{loss} : sluice::slice_loss{std::pair{loss, 1}};
            }),
            "either every slice of a batch brings a weight, or none");
}

TEST_F(torch_step_errors, a_step_inside_of_a_step) {
  step step{model_, optimizer_};
  EXPECT_THROW(step(
                   [&](auto const& slices) {
                     step(cross_entropy_of(model_), batch_of(2));
                     return F::cross_entropy(model_->forward(slices[0]), slices[1]);
                   },
                   batch_of(4)),
               sluice::step_error);
}

TEST_F(torch_step_errors, a_closure_that_is_not_called) {
  EXPECT_THAT(complaint([&] {
                class idle final : public torch::optim::SGD {
                 public:
                  using SGD::SGD;
                  torch::Tensor step(LossClosure /*closure*/) override { return {}; }
                };
                idle optimizer{model_->parameters(), torch::optim::SGDOptions{0.1}};
                step{model_, optimizer, {.closure = true}}(cross_entropy_of(model_), batch_of(2));
              }),
              ::testing::HasSubstr("has not called its closure"));
}

}  // namespace
