#include "runtime/torch/model/detail/code_effects.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

namespace sluice::server::testing {
namespace {

class code_effects : public ::testing::Test {
 protected:
  code_effects() {
    module_.register_parameter("w", at::ones({3}), false);
    module_.register_buffer("mean", at::zeros({3}));
    module_.register_attribute("training", c10::BoolType::get(), false);
    module_.register_attribute("steps", c10::IntType::get(), 3);
    module_.register_attribute("kept", c10::ListType::ofTensors(), c10::List<at::Tensor>{});
  }

  std::string of(std::string const& body) {
    module_.define("def forward(self, x):\n" + body);
    return detail::lasting_effect_of(module_).value_or("");
  }

  torch::jit::Module module_{"m"};
};

TEST_F(code_effects, are_none_of_code_that_only_computes) {
  EXPECT_EQ(of("  y = x * self.w + self.mean\n"
               "  for i in range(self.steps):\n"
               "    y = torch.relu_(y + 1.0)\n"
               "  return y\n"),
            "");
}

TEST_F(code_effects, are_none_of_what_an_attribute_turns_off) {
  EXPECT_EQ(
      of("  if self.training:\n"
         "    self.mean.add_(x)\n"
         "  return torch.batch_norm(x, None, None, self.mean, self.w, self.training, 0.1, 0.00001, "
         "False)\n"),
      "");
}

TEST_F(code_effects, are_an_attribute_that_is_assigned) {
  EXPECT_EQ(of("  self.steps = self.steps + 1\n  return x\n"), "it assigns to 'steps'");
}

TEST_F(code_effects, are_a_tensor_that_is_written_into) {
  EXPECT_EQ(of("  self.mean.add_(x)\n  return x\n"), "it may write into 'mean'");
}

TEST_F(code_effects, are_a_view_that_is_written_into) {
  EXPECT_EQ(of("  self.mean[0:2].mul_(2.0)\n  return x\n"), "it may write into 'mean'");
}

TEST_F(code_effects, are_statistics_that_a_batch_adds_to) {
  EXPECT_NE(of("  return torch.batch_norm(x, None, None, self.mean, self.w, True, 0.1, 0.00001, "
               "False)\n"),
            "");
}

TEST_F(code_effects, are_a_list_that_grows) {
  EXPECT_NE(of("  self.kept.append(x)\n  return x\n"), "");
}

}  // namespace
}  // namespace sluice::server::testing
