#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>

#include <cstring>
#include <fstream>
#include <limits>

#include "memhandover/base/error.hpp"
#include "tests/runtime/server_model/a_torch_model.hpp"

namespace sluice::server::testing {
namespace {

TEST_F(a_torch_model, computes_out_of_the_memory_that_it_was_lent) {
  parameter("w", at::tensor({1.F, 2.F, 3.F}));
  auto const model = prepare("def forward(self, x):\n  return x * self.w");
  ASSERT_EQ(model->bytes(), 12U);
  lent_memory memory{*model};
  model->load(memory.addresses());
  EXPECT_EQ(values_of(run(*model, {1, 1, 1})[0]), (values{1, 2, 3}));
  values const changed{10, 20, 30};
  std::memcpy(memory.data(), changed.data(), 12);
  EXPECT_EQ(values_of(run(*model, {1, 1, 1})[0]), changed);
  model->unload();
}

TEST_F(a_torch_model, never_touches_memory_again_that_it_has_returned) {
  parameter("w", at::arange(3, at::kFloat));
  auto const model = prepare("def forward(self, x):\n  return x + self.w");
  for (int round = 0; round < 20; ++round) {
    lent_memory memory{*model};
    model->load(memory.addresses());
    EXPECT_EQ(values_of(run(*model, {1, 1, 1, 2, 2, 2})[0]), (values{1, 2, 3, 2, 3, 4}));
    model->unload();
    memory.forbid();
  }
}

TEST_F(a_torch_model, keeps_shared_storage_shared_and_strides_as_they_were) {
  auto const base = at::arange(9, at::kFloat).reshape({3, 3});
  parameter("w", base);
  parameter("same", base);
  parameter("transposed", base.t());
  parameter("row", base.select(0, 1));
  auto const model = prepare(
      "def forward(self, x):\n"
      "  return x @ self.w + x @ self.same + x @ self.transposed + self.row");
  EXPECT_EQ(model->bytes(), 36U) << "one storage counts once";
  lent_memory memory{*model};
  model->load(memory.addresses());
  auto const x = at::tensor({1.F, -2.F, 5.F}).reshape({1, 3});
  auto const expected = x.matmul(base) * 2 + x.matmul(base.t()) + base.select(0, 1);
  EXPECT_EQ(values_of(run(*model, {1, -2, 5})[0]),
            values(expected.data_ptr<float>(), expected.data_ptr<float>() + 3));
  model->unload();
}

TEST_F(a_torch_model, finds_weights_in_submodules_lists_and_optional_attributes) {
  torch::jit::Module inner{"inner"};
  inner.register_parameter("w", at::full({64}, 2.F), false);
  inner.define("def forward(self, x):\n  return x * self.w[0]\n");
  module_.register_module("inner", inner);
  module_.register_attribute("more", c10::ListType::ofTensors(),
                             c10::List<at::Tensor>{{at::full({64}, 3.F), at::full({64}, 4.F)}});
  module_.register_attribute("maybe", c10::OptionalType::ofTensor(), at::full({64}, 5.F));
  auto const model = prepare(
      "def forward(self, x):\n"
      "  maybe = self.maybe\n"
      "  assert maybe is not None\n"
      "  return self.inner.forward(x) + self.more[0][0] + self.more[1][0] + maybe[0]");
  EXPECT_EQ(model->bytes(), 4U * 256U);
  lent_memory memory{*model};
  model->load(memory.addresses());
  EXPECT_EQ(values_of(run(*model, {1, 0, 0})[0]), (values{14, 12, 12}));
  model->unload();
  memory.forbid();
}

TEST_F(a_torch_model, forgets_between_requests_what_forward_changed) {
  module_.register_buffer("count", at::zeros({3}));
  module_.register_buffer("last", at::zeros({3}));
  module_.register_attribute("calls", c10::IntType::get(), 0);
  auto const model = prepare(
      "def forward(self, x):\n"
      "  self.count.add_(1.0)\n"
      "  self.last = self.last + x.sum()\n"
      "  self.calls = self.calls + 1\n"
      "  return x * 0.0 + self.count + self.last + float(self.calls)");
  lent_memory memory{*model};
  model->load(memory.addresses());
  for (int request = 0; request < 3; ++request) {
    EXPECT_EQ(values_of(run(*model, {1, 1, 1})[0]), (values{5, 5, 5}));
  }
  model->unload();
  memory.forbid();
}

TEST_F(a_torch_model, forgets_what_a_failing_forward_changed) {
  module_.register_buffer("count", at::zeros({3}));
  auto const model = prepare(
      "def forward(self, x):\n"
      "  self.count.add_(1.0)\n"
      "  assert bool(x[0][0] >= 0.0), \"negative numbers are not taken\"\n"
      "  return x + self.count");
  lent_memory memory{*model};
  model->load(memory.addresses());
  auto const thrown = failure(*model, {floats("x", {1, 3}, {-1, 0, 0})});
  ASSERT_TRUE(thrown);
  EXPECT_EQ(thrown->kind(), error_kind::model_error);
  EXPECT_STREQ(thrown->what(), "model 'test': AssertionError: negative numbers are not taken");
  EXPECT_EQ(values_of(run(*model, {1, 1, 1})[0]), (values{2, 2, 2}));
  model->unload();
}

TEST_F(a_torch_model, keeps_its_memory_while_it_keeps_views_of_it_in_a_list) {
  parameter("w", at::ones({3}));
  module_.register_attribute("kept", c10::ListType::ofTensors(), c10::List<at::Tensor>{});
  auto const model = prepare(
      "def forward(self, x):\n"
      "  self.kept.append(self.w[0])\n"
      "  return x + self.w");
  lent_memory memory{*model};
  model->load(memory.addresses());
  EXPECT_EQ(values_of(run(*model, {1, 1, 1})[0]), (values{2, 2, 2}));
  try {
    model->unload();
    ADD_FAILURE() << "memory would be released under a view of it";
  } catch (error const& thrown) {
    EXPECT_EQ(thrown.kind(), error_kind::internal);
  }
  EXPECT_EQ(values_of(run(*model, {1, 1, 1})[0]), (values{2, 2, 2}));
}

TEST_F(a_torch_model, copies_a_result_that_is_one_of_its_weights) {
  parameter("w", at::tensor({1.F, 2.F, 3.F}).reshape({1, 3}));
  auto const model = prepare("def forward(self, x):\n  return self.w");
  lent_memory memory{*model};
  model->load(memory.addresses());
  auto const outputs = run(*model, {0, 0, 0});
  model->unload();
  memory.forbid();
  EXPECT_EQ(values_of(outputs[0]), (values{1, 2, 3}));
}

TEST_F(a_torch_model, answers_tuples_by_place_and_only_what_is_wanted) {
  options_.outputs = {{"sum", datatype::fp32, {}},
                      {"count", datatype::int64, {}},
                      {"same", datatype::fp32, {-1, 3}}};
  auto const model = prepare("def forward(self, x):\n  return x.sum(), x.size(0), x");
  model->load({});
  std::vector<tensor> inputs{floats("x", {2, 3}, {1, 2, 3, 4, 5, 6})};
  auto const all = model->run(inputs, {});
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(values_of(all[0]), values{21});
  EXPECT_TRUE(all[0].shape.empty());
  EXPECT_EQ(all[1].data.span()[0], std::byte{2});
  auto const some = model->run(inputs, {"same", "sum"});
  ASSERT_EQ(some.size(), 2U);
  EXPECT_EQ(some[0].name, "same");
  EXPECT_EQ(some[1].name, "sum");
  EXPECT_EQ(failure(*model, inputs, {"nothing"})->kind(), error_kind::invalid_argument);
}

TEST_F(a_torch_model, answers_dictionaries_by_name) {
  options_.outputs = {{"b", datatype::fp32, {-1, 3}}, {"a", datatype::fp32, {-1, 3}}};
  auto const model = prepare("def forward(self, x):\n  return {\"a\": x, \"b\": x + 1.0}");
  model->load({});
  auto const outputs = run(*model, {1, 2, 3});
  EXPECT_EQ(outputs[0].name, "b");
  EXPECT_EQ(values_of(outputs[0]), (values{2, 3, 4}));
  EXPECT_EQ(values_of(outputs[1]), (values{1, 2, 3}));
}

TEST_F(a_torch_model, takes_one_number_where_forward_takes_a_number) {
  options_.inputs.push_back({"n", datatype::int64, {-1}});
  auto const model = prepare("def forward(self, x, n: int):\n  return x * n");
  model->load({});
  std::int64_t const three = 3;
  tensor n{"n", datatype::int64, {1}, std::vector<std::byte>(8)};
  std::memcpy(n.data.data(), &three, 8);
  std::vector<tensor> inputs{n, floats("x", {1, 3}, {1, 2, 3})};  // any order
  EXPECT_EQ(values_of(model->run(inputs, {})[0]), (values{3, 6, 9}));
  inputs[0].shape = {2};
  inputs[0].data = std::vector<std::byte>(16);
  EXPECT_EQ(failure(*model, inputs)->kind(), error_kind::invalid_argument);
}

TEST_F(a_torch_model, refuses_inputs_that_do_not_fit_and_says_what_would) {
  auto const model = prepare("def forward(self, x):\n  return x");
  model->load({});
  auto text = [&](std::vector<tensor> inputs) {
    auto const thrown = failure(*model, std::move(inputs));
    return thrown && thrown->kind() == error_kind::invalid_argument ? std::string{thrown->what()}
                                                                    : "no refusal";
  };
  EXPECT_EQ(text({}), "model 'test': input 'x' is missing");
  EXPECT_EQ(text({floats("x", {1, 2}, {1, 2})}),
            "model 'test': input 'x' has the shape [1, 2]; the model takes [-1, 3]");
  EXPECT_EQ(text({floats("x", {1, 3}, {1})}),
            "model 'test': input 'x' of shape [1, 3] brings 4 bytes; its shape needs 12");
  auto wrong_type = floats("x", {1, 3}, {1, 2, 3});
  wrong_type.type = datatype::int32;
  EXPECT_EQ(text({wrong_type}), "model 'test': input 'x' is INT32; the model takes FP32");
  EXPECT_EQ(text({floats("x", {1, 3}, {1, 2, 3}), floats("z", {1}, {1})}),
            "model 'test': the request has 2 inputs; the model takes 1");
  EXPECT_EQ(
      text({floats("x", {std::numeric_limits<std::int64_t>::max() / 2, 3}, {1})}),
      "model 'test': input 'x' has the shape [4611686018427387903, 3], which no tensor can have");
}

TEST_F(a_torch_model, is_given_and_gives_other_shapes_than_requests_where_it_is_configured_so) {
  using shape = std::vector<std::int64_t>;
  options_.inputs = {{"x", datatype::fp32, {-1, 2, -1, 3}, shape{-1, 2, 1, -1, 3}},
                     {"n", datatype::fp32, {1}, shape{}}};
  options_.outputs = {{"y", datatype::fp32, {-1, 6, -1}, shape{-1, 2, 3, -1}}};
  auto const model = prepare(
      "def forward(self, x, n):\n"
      "  assert x.dim() == 5 and x.size(2) == 1 and n.dim() == 0\n"
      "  return x.squeeze(2).transpose(2, 3) * n");
  lent_memory const memory{*model};
  model->load(memory.addresses());
  std::vector<tensor> inputs{floats("x", {1, 2, 2, 3}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}),
                             floats("n", {1}, {10})};
  auto const outputs = model->run(inputs, {});
  EXPECT_EQ(outputs.at(0).shape, (shape{1, 6, 2}));
  EXPECT_EQ(values_of(outputs[0]), (values{10, 40, 20, 50, 30, 60, 70, 100, 80, 110, 90, 120}));
  inputs[0] = floats("x", {0, 2, 5, 3}, {});
  EXPECT_EQ(model->run(inputs, {}).at(0).shape, (shape{0, 6, 5}));
  auto const thrown = failure(*model, {floats("x", {1, 2, 1, 2, 3}, values(12)), inputs[1]});
  ASSERT_TRUE(thrown);
  EXPECT_STREQ(
      thrown->what(),
      "model 'test': input 'x' has the shape [1, 2, 1, 2, 3]; the model takes [-1, 2, -1, 3]");
}

TEST_F(a_torch_model, tells_torchs_own_reason_in_one_line) {
  parameter("w", at::ones({4, 2}));
  auto const model = prepare("def forward(self, x):\n  return x @ self.w");
  lent_memory memory{*model};
  model->load(memory.addresses());
  auto const thrown = failure(*model, {floats("x", {1, 3}, {1, 2, 3})});
  ASSERT_TRUE(thrown);
  EXPECT_EQ(thrown->kind(), error_kind::model_error);
  std::string const text = thrown->what();
  EXPECT_NE(text.find("shapes cannot be multiplied"), std::string::npos) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  EXPECT_EQ(text.find("frame"), std::string::npos) << text;
  model->unload();
}

TEST_F(a_torch_model, blames_its_configuration_for_a_result_that_this_does_not_describe) {
  auto const model = prepare("def forward(self, x):\n  return x.to(6).sum(1)");
  EXPECT_NO_THROW(model->load({}));
  auto const thrown = failure(*model, {floats("x", {1, 3}, {1, 2, 3})});
  ASSERT_TRUE(thrown);
  EXPECT_EQ(to_string(thrown->kind()), "misconfigured");
  EXPECT_STREQ(thrown->what(),
               "model 'test': output 'y' is FP32 of shape [1], but the model's configuration says "
               "FP32 of shape [-1, 3]; put into the model's config.pbtxt what 'forward' returns");
}

class the_names_of_a_torch_model : public a_torch_model {
 protected:
  void name_inputs(std::vector<std::string> const& names) {
    options_.inputs.clear();
    for (auto const& each : names) {
      options_.inputs.push_back({each, datatype::fp32, {-1, 1}});
    }
    options_.outputs[0].shape = {-1, 1};
  }
  void name_outputs(std::vector<std::string> const& names) {
    options_.outputs.clear();
    for (auto const& each : names) {
      options_.outputs.push_back({each, datatype::fp32, {-1, -1}});
    }
  }

  /// What comes out of 10 for the first of these names, and 1 for the second.
  values difference(std::string const& ten, std::string const& one) {
    auto const model = prepare("def forward(self, a, b):\n  return a - b");
    model->load({});
    std::vector<tensor> inputs{floats(one, {2, 1}, {1, 2}), floats(ten, {2, 1}, {10, 20})};
    return values_of(model->run(inputs, {})[0]);
  }

  std::string refusal(std::string const& source) {
    try {
      (void)prepare(source);
    } catch (error const& thrown) {
      return thrown.kind() == error_kind::invalid_argument ? thrown.what() : "another kind";
    }
    return "no refusal";
  }

  static constexpr auto* one_result = "def forward(self, a, b):\n  return a - b";
  static constexpr auto* three_results = "def forward(self, x):\n  return x, x + 1.0, x + 2.0";
};

TEST_F(the_names_of_a_torch_model, say_by_their_index_which_argument_an_input_is) {
  name_inputs({"INPUT__1", "INPUT__0"});
  EXPECT_EQ(difference("INPUT__0", "INPUT__1"), (values{9, 18}));
}

TEST_F(the_names_of_a_torch_model, say_as_the_arguments_name_which_one_an_input_is) {
  name_inputs({"b", "a"});
  EXPECT_EQ(difference("a", "b"), (values{9, 18}));
}

TEST_F(the_names_of_a_torch_model,
       that_say_nothing_leave_inputs_in_the_order_of_the_configuration) {
  name_inputs({"second", "first"});
  EXPECT_EQ(difference("second", "first"), (values{9, 18}));
}

TEST_F(the_names_of_a_torch_model, are_refused_where_some_say_a_place_and_some_do_not) {
  name_inputs({"b", "other"});
  EXPECT_EQ(
      refusal(one_result),
      "model 'test': its configuration names the inputs 'b', 'other', but 'forward' takes "
      "'a', 'b'; name all inputs like the arguments, or all <name>__<index> with indices from "
      "0 to 1");
}

TEST_F(the_names_of_a_torch_model, may_leave_out_arguments_that_have_defaults) {
  options_.inputs = {{"c", datatype::fp32, {-1, 1}}, {"a", datatype::fp32, {-1, 1}}};
  options_.outputs[0].shape = {-1, 1};
  auto const model = prepare(
      "def forward(self, a, b: float = 0.5, c: Optional[Tensor] = None):\n"
      "  assert c is not None\n"
      "  return a - c + b");
  model->load({});
  std::vector<tensor> inputs{floats("a", {1, 1}, {10}), floats("c", {1, 1}, {1})};
  EXPECT_EQ(values_of(model->run(inputs, {})[0]), values{9.5});
}

TEST_F(the_names_of_a_torch_model, are_keys_where_forward_takes_one_dictionary) {
  name_inputs({"b", "a"});
  auto const model =
      prepare("def forward(self, x: Dict[str, Tensor]):\n  return x[\"a\"] - x[\"b\"]");
  model->load({});
  std::vector<tensor> inputs{floats("b", {1, 1}, {1}), floats("a", {1, 1}, {10})};
  EXPECT_EQ(values_of(model->run(inputs, {})[0]), values{9});
}

TEST_F(the_names_of_a_torch_model, say_by_their_index_which_result_an_output_is) {
  name_outputs({"OUTPUT__2", "OUTPUT__0"});
  auto const model = prepare(three_results);
  model->load({});
  auto const outputs = run(*model, {1, 2, 3});
  ASSERT_EQ(outputs.size(), 2U);
  EXPECT_EQ(outputs[0].name, "OUTPUT__2");
  EXPECT_EQ(values_of(outputs[0]), (values{3, 4, 5}));
  EXPECT_EQ(values_of(outputs[1]), (values{1, 2, 3}));
}

TEST_F(the_names_of_a_torch_model,
       leave_outputs_in_the_order_of_the_configuration_without_an_index) {
  name_outputs({"b", "a"});  // fewer than there are
  auto const model = prepare(three_results);
  model->load({});
  auto const outputs = run(*model, {1, 2, 3});
  EXPECT_EQ(values_of(outputs[0]), (values{1, 2, 3}));
  EXPECT_EQ(values_of(outputs[1]), (values{2, 3, 4}));
}

TEST_F(the_names_of_a_torch_model, are_refused_where_the_code_has_no_such_output) {
  name_outputs({"OUTPUT__0", "OUTPUT__3"});
  EXPECT_EQ(refusal(three_results),
            "model 'test': its configuration names the outputs 'OUTPUT__0', 'OUTPUT__3', but "
            "'forward' returns 3, so that there is no 'OUTPUT__3', index 3");
}

TEST_F(the_names_of_a_torch_model, do_not_help_an_output_whose_type_the_code_contradicts) {
  name_outputs({"OUTPUT__0", "OUTPUT__1"});
  EXPECT_EQ(refusal("def forward(self, x):\n  return x, x.size(0)"),
            "model 'test': its configuration says that output 'OUTPUT__1' is FP32, but 'forward' "
            "returns INT64 there; put this into the configuration");
}

TEST_F(the_names_of_a_torch_model, are_said_where_only_a_run_shows_how_many_outputs_there_are) {
  name_outputs({"OUTPUT__0", "OUTPUT__2"});
  auto const model = prepare("def forward(self, x):\n  return [x, x]");
  model->load({});
  auto const thrown = failure(*model, {floats("x", {1, 3}, {1, 2, 3})});
  ASSERT_TRUE(thrown);
  EXPECT_EQ(to_string(thrown->kind()), "misconfigured");
  EXPECT_NE(std::string{thrown->what()}.find("no output 'OUTPUT__2'"), std::string::npos)
      << thrown->what();
}

TEST_F(a_torch_model, is_refused_when_its_configuration_names_other_inputs_than_forward_takes) {
  options_.inputs.push_back({"z", datatype::fp32, {1}});
  try {
    (void)prepare("def forward(self, x):\n  return x");
    FAIL() << "no error";
  } catch (error const& thrown) {
    EXPECT_EQ(thrown.kind(), error_kind::invalid_argument);
    EXPECT_STREQ(thrown.what(),
                 "model 'test': its configuration names the inputs 'x', 'z', but 'forward' takes "
                 "'x'; name one input for each");
  }
}

TEST_F(a_torch_model, is_refused_when_its_file_is_missing_or_no_torchscript) {
  try {
    (void)prepare_torch_model(options_);
    FAIL() << "no error";
  } catch (error const& thrown) {
    EXPECT_EQ(thrown.kind(), error_kind::not_found);
  }
  std::ofstream{options_.file} << "this is no model";
  try {
    (void)prepare_torch_model(options_);
    FAIL() << "no error";
  } catch (error const& thrown) {
    EXPECT_EQ(thrown.kind(), error_kind::invalid_argument);
    EXPECT_EQ(std::string{thrown.what()}.find('\n'), std::string::npos) << thrown.what();
  }
}

TEST_F(a_torch_model, with_bytes_tensors_is_unsupported) {
  options_.inputs[0].type = datatype::bytes;
  try {
    (void)prepare("def forward(self, x):\n  return x");
    FAIL() << "no error";
  } catch (error const& thrown) {
    EXPECT_EQ(thrown.kind(), error_kind::unsupported);
  }
}

TEST_F(a_torch_model, whose_load_fails_stays_cold_and_can_be_loaded_later) {
  parameter("w", at::ones({3}));
  auto const model = prepare("def forward(self, x):\n  return x + self.w");
  std::vector<std::byte*> const nowhere{nullptr};
  EXPECT_THROW(model->load(nowhere), error);
  lent_memory memory{*model};
  model->load(memory.addresses());
  EXPECT_EQ(values_of(run(*model, {1, 1, 1})[0]), (values{2, 2, 2}));
  model->unload();
  memory.forbid();
}

}  // namespace
}  // namespace sluice::server::testing
