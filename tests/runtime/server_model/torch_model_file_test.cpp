/// What a model reads of its file, and when.

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/csrc/jit/api/module.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>

#include "memhandover/base/error.hpp"
#include "tests/runtime/server_model/a_torch_model.hpp"

namespace sluice::server::testing {
namespace {

constexpr std::int64_t many = 5 << 20;  // floats: two steps of an image and a part of a third
constexpr std::uint64_t many_bytes = 4 * static_cast<std::uint64_t>(many);

constexpr auto* picks_three =
    "def forward(self, x):\n"
    "  return x + self.w[:3] + self.w[self.w.size(0) - 3:] + self.small";

class a_torch_model_file : public a_torch_model {
 protected:
  std::unique_ptr<hosted_model> prepare_large(std::int64_t count = many) {
    parameter("w", at::arange(count, at::kFloat));
    parameter("small", at::ones({3}));
    return prepare(picks_three);
  }

  static values expected_of_large(std::int64_t count = many) {
    auto const last = static_cast<float>(count);
    return {last - 2, last, last + 2};  // 0 + (count - 3) + 1, …
  }

  /// The same file with every record compressed.
  void compress() const {
    auto const packed = options_.file.string() + ".packed";
    {
      caffe2::serialize::PyTorchStreamReader reader{options_.file.string()};
      caffe2::serialize::PyTorchStreamWriter writer{packed};
      for (auto const& name : reader.getAllRecords()) {
        if (name == "version" || name.starts_with(".data/")) {
          continue;  // the writer's own
        }
        auto const [data, bytes] = reader.getRecord(name);
        writer.writeRecord(name, data.get(), bytes, /*compress=*/true);
      }
      writer.writeEndOfFile();
    }
    std::filesystem::rename(packed, options_.file);
  }

  void touch() const {
    std::filesystem::last_write_time(
        options_.file, std::filesystem::last_write_time(options_.file) + std::chrono::seconds{1});
  }
};

template <typename Function>
std::optional<error> failure_of(Function const& function) {
  try {
    function();
  } catch (error const& thrown) {
    return thrown;
  }
  return std::nullopt;
}

TEST_F(a_torch_model_file, is_read_without_its_weights_and_serves_from_memory_that_holds_them) {
  auto const first = prepare_large();
  lent_memory memory{*first};
  first->load(memory.addresses());
  auto const second = prepare_torch_model(options_);
  EXPECT_EQ(second->fingerprint(), first->fingerprint());
  EXPECT_EQ(second->bytes(), first->bytes());
  second->attach(memory.addresses());
  EXPECT_EQ(values_of(run(*second, {0, 0, 0})[0]), expected_of_large());
  EXPECT_EQ(second->image_bytes(), 0U);
  EXPECT_LT(second->read_bytes(), 64U << 10U) << "code and structure, no weights";
  second->unload();
  first->unload();
}

TEST_F(a_torch_model_file, is_read_step_by_step_and_only_once) {
  auto const model = prepare_large();
  auto const structure = model->read_bytes();
  int steps = 0;
  while (model->image_bytes() < model->bytes()) {
    auto const before = model->image_bytes();
    model->extend_image();
    ASSERT_GT(model->image_bytes(), before);
    ++steps;
  }
  EXPECT_EQ(steps, 3);
  EXPECT_EQ(model->read_bytes() - structure, many_bytes + 12);
  for (int round = 0; round < 2; ++round) {
    lent_memory memory{*model};
    model->load(memory.addresses());
    EXPECT_EQ(values_of(run(*model, {0, 0, 0})[0]), expected_of_large());
    model->unload();
  }
  EXPECT_EQ(model->read_bytes() - structure, many_bytes + 12);
}

TEST_F(a_torch_model_file, may_be_half_read_when_the_model_is_loaded) {
  auto const model = prepare_large();
  auto const structure = model->read_bytes();
  model->extend_image();
  lent_memory memory{*model};
  model->load(memory.addresses());
  EXPECT_EQ(model->image_bytes(), model->bytes());
  EXPECT_EQ(model->read_bytes() - structure, many_bytes + 12);
  EXPECT_EQ(values_of(run(*model, {0, 0, 0})[0]), expected_of_large());
  std::vector<float> loaded(many);
  std::memcpy(loaded.data(), memory.addresses()[0], many_bytes);
  auto const original = at::arange(many, at::kFloat);
  EXPECT_EQ(std::memcmp(loaded.data(), original.data_ptr<float>(), many_bytes), 0);
  model->unload();
}

TEST_F(a_torch_model_file, gives_back_what_forward_changed_before_there_is_an_image) {
  module_.register_buffer("count", at::zeros({3}));
  parameter("w", at::zeros({many}));
  constexpr auto* counts =
      "def forward(self, x):\n"
      "  self.count.add_(1.0)\n"
      "  return x + self.count + self.w[0]";
  auto const first = prepare(counts);
  lent_memory memory{*first};
  first->load(memory.addresses());
  auto const second = prepare_torch_model(options_);
  auto const structure = second->read_bytes();
  second->attach(memory.addresses());
  for (int request = 0; request < 3; ++request) {
    EXPECT_EQ(values_of(run(*second, {1, 1, 1})[0]), (values{2, 2, 2}));
    EXPECT_TRUE(second->is_intact());
  }
  EXPECT_EQ(second->read_bytes() - structure, 3 * 12U) << "of these weights alone";
  EXPECT_EQ(second->image_bytes(), 0U);
  touch();
  std::vector<tensor> const inputs{floats("x", {1, 3}, {1, 1, 1})};
  EXPECT_EQ(failure(*second, inputs)->kind(), error_kind::unavailable);
  EXPECT_FALSE(second->is_intact()) << "a successor would take over what the request has left";
  EXPECT_EQ(failure(*second, inputs)->kind(), error_kind::unavailable)
      << "not computed with what the request before has left";
  second->unload();
  first->unload();
}

TEST_F(a_torch_model_file, that_was_written_to_is_an_error_of_the_next_load_but_not_of_requests) {
  auto const first = prepare_large();
  lent_memory memory{*first};
  first->load(memory.addresses());
  auto const second = prepare_torch_model(options_);
  second->extend_image();
  second->attach(memory.addresses());
  touch();
  EXPECT_EQ(values_of(run(*second, {0, 0, 0})[0]), expected_of_large());
  second->unload();
  auto const thrown = failure_of([&] { second->load(memory.addresses()); });
  ASSERT_TRUE(thrown);
  EXPECT_EQ(thrown->kind(), error_kind::unavailable);
  EXPECT_NE(std::string{thrown->what()}.find(options_.file.string()), std::string::npos)
      << thrown->what();
  EXPECT_NE(prepare_torch_model(options_)->fingerprint(), second->fingerprint());
  first->unload();
  first->load(memory.addresses());  // its image was complete
  EXPECT_EQ(values_of(run(*first, {0, 0, 0})[0]), expected_of_large());
  first->unload();
}

TEST_F(a_torch_model_file, that_was_replaced_or_removed_is_still_the_one_that_was_opened) {
  auto const model = prepare_large();
  for (bool const removed : {false, true}) {
    if (removed) {
      std::filesystem::remove(options_.file);
    } else {
      torch::jit::Module other{"other"};
      other.register_parameter("w", at::zeros({3}), false);
      other.define("def forward(self, x):\n  return x\n");
      other.save(options_.file.string() + ".new");
      std::filesystem::rename(options_.file.string() + ".new", options_.file);
    }
    lent_memory memory{*model};
    model->load(memory.addresses());
    EXPECT_EQ(values_of(run(*model, {0, 0, 0})[0]), expected_of_large());
    model->unload();
  }
}

TEST_F(a_torch_model_file, with_compressed_weights_is_read_at_once) {
  (void)prepare_large(10'000);
  compress();
  auto const model = prepare_torch_model(options_);
  EXPECT_EQ(model->image_bytes(), 0U);
  auto const read = model->read_bytes();
  lent_memory memory{*model};
  model->load(memory.addresses());
  EXPECT_EQ(model->read_bytes(), read);
  EXPECT_EQ(values_of(run(*model, {0, 0, 0})[0]), expected_of_large(10'000));
  model->unload();
}

TEST_F(a_torch_model_file, whose_reading_runs_code_is_read_at_once) {
  torch::jit::Module inner{"inner"};
  inner.register_parameter("w", at::full({3}, 2.F), false);
  inner.register_parameter("sum", at::zeros({}), false);
  inner.define(
      "def __getstate__(self):\n"
      "  return (self.w, 1)\n"
      "def __setstate__(self, state: Tuple[Tensor, int]):\n"
      "  self.w = state[0]\n"
      "  self.sum = state[0].sum()\n"
      "def forward(self, x):\n"
      "  return x * self.w + self.sum\n");
  module_.register_module("inner", inner);
  auto const model = prepare("def forward(self, x):\n  return self.inner.forward(x)");
  lent_memory memory{*model};
  model->load(memory.addresses());
  EXPECT_EQ(values_of(run(*model, {1, 1, 1})[0]), (values{8, 8, 8}));
  model->unload();
}

TEST_F(a_torch_model_file, with_sparse_and_quantised_tensors_is_read_at_once) {
  parameter("w", at::ones({3}));
  module_.register_buffer("sparse", at::eye(3).to_sparse());
  module_.register_buffer("packed",
                          at::quantize_per_tensor(at::full({3}, 2.F), 0.5, 0, at::kQInt8));
  auto const model = prepare(
      "def forward(self, x):\n"
      "  return x + self.w + torch.dequantize(self.packed) + torch.sum(self.sparse.to_dense(), 0)");
  EXPECT_EQ(model->bytes(), 12U);
  lent_memory memory{*model};
  model->load(memory.addresses());
  EXPECT_EQ(values_of(run(*model, {1, 1, 1})[0]), (values{5, 5, 5}));
  model->unload();
}

TEST_F(a_torch_model_file, with_constants_in_its_code_has_them_read) {
  parameter("w", at::ones({many}));
  module_.define("def forward(self, x):\n  return x + self.w[0]\n");
  module_.save(options_.file.string());
  auto const constant = at::tensor({1.F, 2.F, 3.F});
  auto graph = module_.get_method("forward").graph();
  {
    auto* const added = graph->insertConstant(constant);
    added->node()->moveBefore(*graph->nodes().begin());
    auto* const sum = graph->insert(c10::aten::add, {graph->outputs()[0], added});
    graph->eraseOutput(0);
    graph->registerOutput(sum);
  }
  module_.save(options_.file.string());
  auto const model = prepare_torch_model(options_);
  EXPECT_LT(model->read_bytes(), 64U << 10U);
  lent_memory memory{*model};
  model->load(memory.addresses());
  EXPECT_EQ(values_of(run(*model, {1, 1, 1})[0]), (values{3, 4, 5}));
  model->unload();
}

TEST_F(a_torch_model_file, that_is_cut_short_is_refused) {
  (void)prepare_large();
  std::filesystem::resize_file(options_.file, std::filesystem::file_size(options_.file) / 2);
  auto const thrown = failure_of([&] { (void)prepare_torch_model(options_); });
  ASSERT_TRUE(thrown);
  EXPECT_EQ(thrown->kind(), error_kind::invalid_argument);
}

TEST_F(a_torch_model_file, that_is_none_is_refused_with_its_models_name_once) {
  auto const text = [&] {
    auto const thrown = failure_of([&] { (void)prepare_torch_model(options_); });
    return thrown ? std::string{thrown->what()} : "no refusal";
  };
  std::ofstream{options_.file, std::ios::binary} << "rubbish";
  EXPECT_TRUE(text().starts_with("model 'test': " + options_.file.string() +
                                 " cannot be read as TorchScript: "))
      << text();
  options_.file += ".missing";
  EXPECT_EQ(text(), "model 'test': there is no file " + options_.file.string());
}

/// A file as torch.save writes it: the same archive, without code and constants.
class a_file_of_torch_save : public a_torch_model_file {
 protected:
  void save(std::string const& pickle) const {
    caffe2::serialize::PyTorchStreamWriter writer{options_.file.string()};
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeRecord("byteorder", "little", 6);
    writer.writeEndOfFile();
  }
  std::string refusal() const {
    auto const thrown = failure_of([&] { (void)prepare_torch_model(options_); });
    return thrown && thrown->kind() == error_kind::invalid_argument ? thrown->what() : "no refusal";
  }
  void expect_refused_as(std::string const& what) const {
    EXPECT_EQ(
        refusal(),
        "model 'test': " + options_.file.string() + " is " + what +
            ", but a model is served from TorchScript, which has its code too: write that file "
            "with torch.jit.script(model.eval()).save(\"model.pt\"), or "
            "torch.jit.trace(model.eval(), example).save(\"model.pt\")");
  }
};

TEST_F(a_file_of_torch_save, that_is_a_state_dict_is_called_so) {
  save(
      "\x80\x02"
      "ccollections\nOrderedDict\nq\x01)Rq\x02.");
  expect_refused_as(
      "a state dict, the weights of a model without its code, as torch.save writes it");
}

TEST_F(a_file_of_torch_save, that_is_a_pickled_module_is_called_so) {
  save(
      "\x80\x02"
      "c__main__\nNet\nq\x01)\x81q\x02.");
  expect_refused_as("a pickled object of the Python class __main__.Net, as torch.save writes it");
}

TEST_F(a_file_of_torch_save, that_is_a_checkpoint_is_called_so) {
  save("\x80\x02}q\x01.");
  expect_refused_as(
      "a pickled dictionary, such as a state dict or a checkpoint, as torch.save writes it");
}

TEST_F(a_file_of_torch_save, that_is_old_is_called_so) {
  std::ofstream{options_.file, std::ios::binary} << "\x80\x02\x8a\nl\xfc\x9c"
                                                    "F\xf9 j\xa8P\x19.";
  expect_refused_as("a Python pickle, as torch.save wrote it before PyTorch 1.6");
}

}  // namespace
}  // namespace sluice::server::testing
