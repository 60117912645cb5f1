/// The gradient scaler has the numbers of torch.amp.GradScaler: those in scaler_values.json, which
/// tests/runtime/step/step_cases_test.py holds against Python's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/utils.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/torch/step/sluice/step.hpp"

using nlohmann::json;
using sluice::grad_scaler;

namespace {

/// A number, or "inf", "-inf" or "nan".
double number_of(json const& value) {
  return value.is_string() ? std::stod(value.get<std::string>()) : value.get<double>();
}

torch::Tensor tensor_of(json const& values) {
  std::vector<double> numbers;
  for (auto const& value : values) {
    numbers.push_back(number_of(value));
  }
  return torch::tensor(numbers, torch::kDouble).to(torch::kFloat);
}

bool same(torch::Tensor const& found, torch::Tensor const& expected) {
  return torch::isclose(found, expected, 0.0, 0.0, /*equal_nan=*/true).all().item<bool>();
}

grad_scaler scaler_with(json const& of) {
  sluice::grad_scaler_options options;
  options.init_scale = of.value("init_scale", options.init_scale);
  options.growth_factor = of.value("growth_factor", options.growth_factor);
  options.backoff_factor = of.value("backoff_factor", options.backoff_factor);
  options.growth_interval = of.value("growth_interval", options.growth_interval);
  return grad_scaler{options};
}

TEST(grad_scaler, has_the_numbers_of_python) {
  for (auto const& run : json::parse(std::ifstream{STEP_CASES "/scaler_values.json"})) {
    auto scaler = scaler_with(run["options"]);
    scaler.place(torch::zeros({}));
    for (auto const& step : run["steps"]) {
      auto const loss = torch::tensor(step["loss"].get<double>(), torch::kFloat);
      EXPECT_EQ(scaler.scale(loss).item<double>(), number_of(step["scaled"]));
      std::vector<torch::Tensor> params;
      for (auto const& gradient : step["gradients"]) {
        params.push_back(torch::zeros({static_cast<std::int64_t>(gradient.size())}));
        params.back().mutable_grad() = tensor_of(gradient);
      }
      scaler.unscale(params);
      for (std::size_t i = 0; i < params.size(); ++i) {
        EXPECT_TRUE(same(params[i].grad(), tensor_of(step["unscaled"][i]))) << params[i].grad();
      }
      EXPECT_EQ(scaler.all_finite(), step["runs"].get<bool>());
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), step["scale"].get<double>());
      EXPECT_EQ(scaler.get_growth_tracker(), step["growth_tracker"].get<std::int64_t>());
    }
  }
}

TEST(grad_scaler, looks_at_gradients_of_every_type_and_at_those_that_are_there) {
  grad_scaler scaler{{.init_scale = 4.0}};
  std::vector params = {torch::zeros({2}), torch::zeros({2}), torch::zeros({2}, torch::kDouble)};
  scaler.place(params[0]);
  params[0].mutable_grad() = torch::ones({2});
  params[2].mutable_grad() = torch::tensor(std::vector<double>{8.0, INFINITY}, torch::kDouble);
  scaler.unscale(params);
  EXPECT_FALSE(scaler.all_finite());
  EXPECT_TRUE(torch::equal(params[0].grad(), torch::full({2}, 0.25)));
  EXPECT_EQ(params[2].grad()[0].item<double>(), 2.0);
  params[2].mutable_grad().reset();
  scaler.update();
  scaler.unscale(params);
  EXPECT_TRUE(scaler.all_finite());
}

TEST(grad_scaler, refuses_gradients_of_half_precision) {
  grad_scaler scaler;
  std::vector params = {torch::zeros({2}, torch::kHalf)};
  scaler.place(params[0]);
  params[0].mutable_grad() = torch::ones({2}, torch::kHalf);
  EXPECT_THROW(scaler.unscale(params), std::invalid_argument);
}

TEST(grad_scaler, looks_at_the_values_of_sparse_gradients) {
  grad_scaler scaler{{.init_scale = 4.0}};
  std::vector params = {torch::zeros({3})};
  scaler.place(params[0]);
  auto const gradient = [](float last) {
    return torch::sparse_coo_tensor(torch::tensor({{0, 2, 2}}), torch::tensor({4.0F, 8.0F, last}),
                                    {3});
  };
  params[0].mutable_grad() = gradient(4.0F);
  scaler.unscale(params);
  EXPECT_TRUE(scaler.all_finite());
  EXPECT_TRUE(torch::equal(params[0].grad().to_dense(), torch::tensor({1.0F, 0.0F, 3.0F})));
  scaler.update();
  params[0].mutable_grad() = gradient(INFINITY);
  scaler.unscale(params);
  EXPECT_FALSE(scaler.all_finite());
}

TEST(grad_scaler, says_nothing_of_gradients_that_it_has_not_seen) {
  grad_scaler scaler;
  std::vector params = {torch::zeros({2})};
  scaler.place(params[0]);
  EXPECT_THROW(scaler.update(), std::logic_error);
  scaler.unscale(params);  // there is none
  EXPECT_THROW(static_cast<void>(scaler.all_finite()), std::logic_error);
  EXPECT_THROW(scaler.update(), std::logic_error);
  params[0].mutable_grad() = torch::ones({2});
  scaler.unscale(params);
  EXPECT_TRUE(scaler.all_finite());
  scaler.update();
  EXPECT_THROW(scaler.update(), std::logic_error);
}

TEST(grad_scaler, goes_on_from_a_checkpoint_and_copies_have_one_scale) {
  grad_scaler scaler{{.init_scale = 16.0, .growth_interval = 3, .growth_tracker = 2}};
  auto copy = scaler;
  EXPECT_EQ(copy.get_scale(), 16.0);
  EXPECT_EQ(copy.get_growth_tracker(), 2);
  std::vector params = {torch::zeros({2})};
  params[0].mutable_grad() = torch::ones({2});
  copy.place(params[0]);
  copy.unscale(params);
  copy.update();
  EXPECT_EQ(scaler.get_scale(), 32.0);
  EXPECT_EQ(scaler.get_growth_tracker(), 0);
}

TEST(grad_scaler, refuses_options_with_which_it_would_not_move) {
  for (sluice::grad_scaler_options const& options : {sluice::grad_scaler_options{.init_scale = 0.0},
                                                     {.init_scale = NAN},
                                                     {.growth_factor = 1.0},
                                                     {.backoff_factor = 1.0},
                                                     {.backoff_factor = 0.0},
                                                     {.growth_interval = 0},
                                                     {.growth_tracker = -1}}) {
    EXPECT_THROW(grad_scaler{options}, std::invalid_argument);
  }
}

}  // namespace
