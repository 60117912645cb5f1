/// Requests that a TorchScript model computes together.

#include <gtest/gtest.h>

#include <cstring>

#include "memhandover/base/error.hpp"
#include "tests/runtime/server_model/a_torch_model.hpp"

namespace sluice::server::testing {
namespace {

/// Some requests of the input x, whose rows have three numbers.
class together {
 public:
  explicit together(std::vector<std::vector<float>> const& all) {
    for (auto const& x : all) {
      inputs_.push_back({floats("x", {static_cast<std::int64_t>(x.size()) / 3, 3}, x)});
    }
    wanted_.resize(all.size());
  }
  void want(std::size_t request, std::vector<std::string> outputs) {
    wanted_[request] = std::move(outputs);
  }
  std::vector<std::vector<tensor>> run(hosted_model& model) {
    std::vector<model_call> calls;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      calls.push_back({inputs_[i], wanted_[i]});
    }
    model.run_together(calls);
    std::vector<std::vector<tensor>> outputs;
    for (auto& each : calls) {
      outputs.push_back(std::move(each.outputs));
    }
    return outputs;
  }

 private:
  std::vector<std::vector<tensor>> inputs_;
  std::vector<std::vector<std::string>> wanted_;
};

TEST_F(a_torch_model, computes_requests_of_different_sizes_in_one_go) {
  parameter("w", at::tensor({1.F, 2.F, 3.F}));
  module_.register_buffer("calls", at::zeros({1}));
  auto const model = prepare(
      "def forward(self, x):\n"
      "  self.calls += 1\n"
      "  return x * self.w + self.calls");
  ASSERT_TRUE(model->can_batch());
  lent_memory memory{*model};
  model->load(memory.addresses());
  for (int round = 0; round < 2; ++round) {
    auto const got = together{{{1, 1, 1}, {2, 2, 2, 3, 3, 3}, {4, 4, 4}}}.run(*model);
    EXPECT_EQ(values_of(got.at(0).at(0)), (values{2, 3, 4})) << "computed once, then undone";
    EXPECT_EQ(values_of(got.at(1).at(0)), (values{3, 5, 7, 4, 7, 10}));
    EXPECT_EQ(got[1][0].shape, (std::vector<std::int64_t>{2, 3}));
    EXPECT_EQ(values_of(got.at(2).at(0)), (values{5, 9, 13}));
  }
  model->unload();
}

TEST_F(a_torch_model, gives_each_request_of_a_batch_the_outputs_that_it_wants) {
  options_.outputs = {{"a", datatype::fp32, {-1, 3}}, {"b", datatype::fp32, {-1}}};
  auto const model = prepare("def forward(self, x):\n  return x + 1, x.sum(1)");
  model->load({});
  together batch{{{1, 2, 3}, {4, 5, 6}, {7, 8, 9}}};
  batch.want(0, {"b"});
  batch.want(1, {"b", "a"});
  auto const got = batch.run(*model);
  ASSERT_EQ(got[0].size(), 1U);
  EXPECT_EQ(values_of(got[0][0]), (values{6}));
  ASSERT_EQ(got[1].size(), 2U);
  EXPECT_EQ(got[1][0].name, "b");
  EXPECT_EQ(values_of(got[1][0]), (values{15}));
  EXPECT_EQ(values_of(got[1][1]), (values{5, 6, 7}));
  ASSERT_EQ(got[2].size(), 2U);
  EXPECT_EQ(values_of(got[2][1]), (values{24}));
}

TEST_F(a_torch_model, whose_outputs_are_not_by_sample_says_so_of_a_batch) {
  options_.outputs[0].shape = {-1};
  auto const model = prepare("def forward(self, x):\n  return x.sum().reshape(1)");
  model->load({});
  EXPECT_EQ(values_of(run(*model, {1, 2, 3})[0]), (values{6}));
  try {
    (void)together{{{1, 2, 3}, {4, 5, 6}}}.run(*model);
    FAIL() << "no error";
  } catch (error const& thrown) {
    EXPECT_EQ(to_string(thrown.kind()), "misconfigured");
    EXPECT_NE(
        std::string{thrown.what()}.find(
            "output 'y' has the shape [1] for 2 samples, which are to be its first dimension"),
        std::string::npos)
        << thrown.what();
  }
}

TEST_F(a_torch_model, cannot_batch_what_fills_a_number_or_has_no_dimension_for_it) {
  options_.inputs = {{"x", datatype::fp32, {-1, 3}}, {"n", datatype::int64, {-1, 1}}};
  EXPECT_FALSE(prepare("def forward(self, x, n: int):\n  return x * n")->can_batch());
}

TEST_F(a_torch_model, cannot_batch_inputs_without_a_batch_dimension) {
  options_.inputs[0].shape = {3};
  EXPECT_FALSE(prepare("def forward(self, x):\n  return x")->can_batch());
}

TEST_F(a_torch_model, that_takes_a_dictionary_computes_batches_too) {
  options_.inputs = {{"x", datatype::fp32, {-1, 3}}};
  auto const model =
      prepare("def forward(self, all: Dict[str, Tensor]):\n  return {'y': all['x'] * 2}");
  ASSERT_TRUE(model->can_batch());
  model->load({});
  auto const got = together{{{1, 2, 3}, {4, 5, 6}}}.run(*model);
  EXPECT_EQ(values_of(got[1][0]), (values{8, 10, 12}));
}

TEST_F(a_torch_model, fails_a_batch_as_a_whole) {
  auto const model = prepare(
      "def forward(self, x):\n"
      "  if bool((x < 0).any()):\n"
      "    assert False, 'negative'\n"
      "  return x");
  model->load({});
  EXPECT_THROW((void)together({{1, 2, 3}, {-1, 0, 0}}).run(*model), error);
  EXPECT_EQ(values_of(together{{{1, 2, 3}, {1, 0, 0}}}.run(*model)[1][0]), (values{1, 0, 0}));
}

}  // namespace
}  // namespace sluice::server::testing
