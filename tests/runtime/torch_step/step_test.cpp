/// The step without a pool: the arithmetic of a plain loop, however the batch is cut.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "tests/runtime/torch_step/small_training.hpp"

using namespace sluice::testing;
using sluice::step;

namespace {

/// What a loop without a step has trained from seed 0 on.
std::vector<torch::Tensor> plain_loop(nn::Sequential (*make)(),
                                      std::vector<step::tensors> const& batches,
                                      std::vector<torch::Tensor>* losses = nullptr,
                                      double clip_norm = 0) {
  torch::manual_seed(0);
  auto model = make();
  auto optimizer = sgd(*model);
  for (auto const& batch : batches) {
    optimizer.zero_grad();
    auto loss = F::cross_entropy(model->forward(batch[0]), batch[1]);
    loss.backward();
    if (clip_norm > 0) {
      nn::utils::clip_grad_norm_(model->parameters(), clip_norm);
    }
    optimizer.step();
    if (losses != nullptr) {
      losses->push_back(loss.detach());
    }
  }
  return weights_of(*model);
}

std::vector<torch::Tensor> stepped(nn::Sequential (*make)(),
                                   std::vector<step::tensors> const& batches,
                                   sluice::step_options options,
                                   std::vector<torch::Tensor>* losses = nullptr) {
  torch::manual_seed(0);
  auto model = make();
  auto optimizer = sgd(*model);
  step step{model, optimizer, std::move(options)};
  for (auto const& batch : batches) {
    auto loss = step(cross_entropy_of(model), batch);
    if (losses != nullptr) {
      losses->push_back(loss);
    }
  }
  return weights_of(*model);
}

std::vector<step::tensors> batches_of(std::vector<std::int64_t> const& sizes) {
  std::vector<step::tensors> result;
  for (auto const size : sizes) {
    result.push_back(batch_of(size, result.size() + 1));
  }
  return result;
}

TEST(torch_step, in_one_slice_is_a_plain_loop_to_the_bit) {
  auto const batches = batches_of({12, 12, 7, 12});
  std::vector<torch::Tensor> expected, losses;
  auto const weights = plain_loop(restless_mlp, batches, &expected);
  EXPECT_TRUE(same_bits(stepped(restless_mlp, batches, {}, &losses), weights));
  EXPECT_TRUE(same_bits(losses, expected));
  EXPECT_TRUE(same_bits(stepped(restless_mlp, batches, {.micro_batch = 12}), weights));
}

TEST(torch_step, in_several_slices_is_a_plain_loop_to_rounding) {
  auto const batches = batches_of({12, 13, 5, 1});
  std::vector<torch::Tensor> expected;
  auto const weights = plain_loop(mlp, batches, &expected);
  for (std::int64_t const micro_batch : {1, 2, 5, 12}) {
    std::vector<torch::Tensor> losses;
    EXPECT_TRUE(close(stepped(mlp, batches, {.micro_batch = micro_batch}, &losses), weights));
    EXPECT_TRUE(close(losses, expected)) << micro_batch;
  }
}

TEST(torch_step, cuts_slices_as_evenly_as_whole_samples_allow) {
  auto model = mlp();
  auto optimizer = sgd(*model);
  step step{model, optimizer, {.micro_batch = 4}};
  std::vector<std::int64_t> sizes;
  step(
      [&](auto const& slices) {
        sizes.push_back(slices[0].size(0));
        return F::cross_entropy(model->forward(slices[0]), slices[1]);
      },
      batch_of(10));
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{4, 3, 3}));
  auto const stats = step.stats();
  EXPECT_EQ(stats.steps, 1);
  EXPECT_EQ(stats.samples, 10);
  EXPECT_EQ(stats.commits, 3);
  EXPECT_EQ(stats.discards, 0);
  EXPECT_EQ(stats.micro_batch, 3);
  EXPECT_FALSE(step.shared());
}

TEST(torch_step, adds_sums_up_as_they_are) {
  auto const [x, y] = std::pair{batch_of(10)[0], batch_of(10)[1]};
  auto gradients_of = [&](sluice::step_options options) {
    torch::manual_seed(0);
    auto model = mlp();
    torch::optim::SGD optimizer{model->parameters(), torch::optim::SGDOptions{1.0}};
    auto const before = weights_of(*model);
    step step{model, optimizer, std::move(options)};
    auto loss = step(
        [&](auto const& slices) {
          return F::cross_entropy(model->forward(slices[0]), slices[1],
                                  F::CrossEntropyFuncOptions{}.reduction(torch::kSum));
        },
        {x, y});
    auto after = weights_of(*model);
    after.push_back(loss);
    return after;
  };
  auto const sum = sluice::reduction::sum;
  EXPECT_TRUE(
      close(gradients_of({.micro_batch = 3, .reduction = sum}), gradients_of({.reduction = sum})));
}

TEST(torch_step, weighs_means_by_what_they_were_taken_over) {
  auto const batch = batch_of(10);
  auto const labels =
      torch::where(torch::arange(10).remainder(3).eq(0), torch::full({10}, -100), batch[1]);
  auto const ignoring = F::CrossEntropyFuncOptions{}.ignore_index(-100);
  torch::manual_seed(0);
  auto whole = mlp();
  auto whole_optimizer = sgd(*whole);
  auto expected = F::cross_entropy(whole->forward(batch[0]), labels, ignoring);
  expected.backward();
  whole_optimizer.step();

  auto check = [&](auto weight_of) {
    torch::manual_seed(0);
    auto model = mlp();
    auto optimizer = sgd(*model);
    step step{model,
              optimizer,
              {.micro_batch = 1}};  // some slices have no label, and a loss that is no number
    auto const loss = step(
        [&](auto const& slices) {
          return std::pair{F::cross_entropy(model->forward(slices[0]), slices[1], ignoring),
                           weight_of(slices[1].ne(-100).sum())};
        },
        {batch[0], labels});
    EXPECT_TRUE(torch::allclose(loss, expected));
    EXPECT_TRUE(close(weights_of(*model), weights_of(*whole)));
  };
  check([](torch::Tensor count) { return count; });
  check([](torch::Tensor const& count) { return count.item<std::int64_t>(); });
  check([](torch::Tensor const& count) { return count.item<float>(); });
}

TEST(torch_step, weighs_losses_of_low_precision_in_float) {
  auto param = torch::ones({1}, torch::TensorOptions{torch::kHalf}.requires_grad(true));
  nn::Module model;
  model.register_parameter("param", param);
  torch::optim::SGD optimizer{{param}, torch::optim::SGDOptions{0.0}};
  step step{model, optimizer, {.micro_batch = 1}};
  auto const loss = step(
      [&](auto const& slices) {
        return std::pair{(param * slices[0]).sum(), 70000};  // more than the type can hold
      },
      {torch::ones({2}, torch::kHalf)});
  EXPECT_FLOAT_EQ(loss.item<float>(), 1.0F);
}

TEST(torch_step, clips_the_gradients_of_the_whole_batch) {
  auto const batches = batches_of({12, 12, 12});
  auto const weights = plain_loop(mlp, batches, nullptr, 0.01);
  EXPECT_FALSE(close(plain_loop(mlp, batches), weights));
  EXPECT_TRUE(close(stepped(mlp, batches, {.micro_batch = 5, .clip_norm = 0.01}), weights));

  auto model = mlp();
  auto optimizer = sgd(*model);
  step step{model, optimizer, {.clip_norm = 1e-3}};
  EXPECT_FALSE(step.grad_norm());
  step(cross_entropy_of(model), batches[0]);
  EXPECT_GT(step.grad_norm().value(), 1e-3);
}

TEST(torch_step, runs_the_slices_again_for_an_optimizer_that_calls_a_closure) {
  auto train = [](std::optional<std::int64_t> micro_batch) {
    torch::manual_seed(0);
    auto model = mlp();
    torch::optim::LBFGS optimizer{model->parameters(), torch::optim::LBFGSOptions{0.5}.max_iter(3)};
    step step{model, optimizer, {.micro_batch = micro_batch}};
    auto const first = step(cross_entropy_of(model), batch_of(12));
    auto const commits = step.stats().commits;
    EXPECT_EQ(step.stats().steps, 1);
    EXPECT_GE(commits, micro_batch ? 6 : 2);
    EXPECT_LT(step(cross_entropy_of(model), batch_of(12)).item<float>(), first.item<float>());
    return weights_of(*model);
  };
  EXPECT_TRUE(close(train(4), train(std::nullopt)));
}

TEST(torch_step, passes_on_whole_what_has_no_samples) {
  auto model = mlp();
  auto optimizer = sgd(*model);
  step step{model, optimizer, {.micro_batch = 2}};
  auto const batch = batch_of(4);
  int calls = 0;
  step(
      [&](auto const& slices) {
        ++calls;
        EXPECT_EQ(slices[2].template item<float>(), 2.0F);
        return slices[2] * F::cross_entropy(model->forward(slices[0]), slices[1]);
      },
      {batch[0], batch[1], torch::tensor(2.0F)});
  EXPECT_EQ(calls, 2);
}

TEST(torch_step, takes_a_module_a_pointer_or_a_holder) {
  auto pointer = std::make_shared<nn::LinearImpl>(5, 3);
  nn::Linear const holder{pointer};
  nn::Module& module = *pointer;
  auto optimizer = sgd(*pointer);
  auto loss_of = [&](auto const& slices) {
    return F::cross_entropy(pointer->forward(slices[0]), slices[1]);
  };
  EXPECT_NO_THROW(step(pointer, optimizer)(loss_of, batch_of(4)));
  EXPECT_NO_THROW(step(holder, optimizer)(loss_of, batch_of(4)));
  step moved{module, optimizer};
  step step{std::move(moved)};
  EXPECT_NO_THROW(step(loss_of, batch_of(4)));
}

TEST(torch_step, has_not_happened_if_the_loss_function_throws) {
  torch::manual_seed(0);
  auto model = mlp();
  auto optimizer = sgd(*model);
  step step{model, optimizer, {.micro_batch = 3}};
  auto const before = weights_of(*model);
  int calls = 0;
  auto failing = [&](auto const& slices) {
    if (++calls == 3) {
      throw std::domain_error{"mine"};
    }
    return F::cross_entropy(model->forward(slices[0]), slices[1]);
  };
  EXPECT_THROW(step(failing, batch_of(12)), std::domain_error);
  EXPECT_TRUE(same_bits(weights_of(*model), before));
  EXPECT_EQ(step.stats().steps, 0);
  for (auto const& param : model->parameters()) {
    EXPECT_FALSE(param.grad().defined());
  }
  step(cross_entropy_of(model), batch_of(12));
  EXPECT_TRUE(close(weights_of(*model), plain_loop(mlp, {batch_of(12)})));
}

TEST(torch_step, gives_gradients_to_what_the_model_has_beside_the_optimizers_parameters) {
  auto model = mlp();
  torch::optim::SGD optimizer{{model->parameters()[0]}, torch::optim::SGDOptions{0.0}};
  step step{model, optimizer, {.micro_batch = 2}};
  step(cross_entropy_of(model), batch_of(4));
  step(cross_entropy_of(model), batch_of(4));  // nothing is left over from the step before
  auto const gradient = model->parameters()[3].grad().clone();
  model->zero_grad();
  cross_entropy_of(model)(batch_of(4)).backward();
  EXPECT_TRUE(torch::allclose(model->parameters()[3].grad(), gradient));
}

/// Remembers what the step says of the gradients that it is given.
class asking final : public torch::optim::SGD {
 public:
  using SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override {
    seen = of->grad_norm();
    return SGD::step(closure);
  }

  sluice::step const* of = nullptr;
  std::optional<double> seen;
};

TEST(torch_step, an_optimizer_finds_the_norm_of_the_gradients_that_it_is_given) {
  auto model = mlp();
  asking optimizer{model->parameters(), torch::optim::SGDOptions{0.1}};
  step step{model, optimizer, {.clip_norm = 1e-3}};
  optimizer.of = &step;
  for (std::int64_t const samples : {8, 4}) {
    step(cross_entropy_of(model), batch_of(samples));
    EXPECT_TRUE(optimizer.seen);
    EXPECT_EQ(optimizer.seen, step.grad_norm());
  }
}

TEST(torch_step, scales_sparse_gradients) {
  auto const trained = [](std::optional<sluice::grad_scaler> scaler) {
    torch::manual_seed(0);
    nn::Embedding words{nn::EmbeddingOptions{6, 3}.sparse(true)};
    torch::optim::SGD optimizer{words->parameters(), torch::optim::SGDOptions{0.1}};
    step step{words, optimizer, {.scaler = std::move(scaler)}};
    step([&](auto const& slices) { return words->forward(slices[0]).square().mean(); },
         {torch::tensor({1, 1, 4})});
    return weights_of(*words);
  };
  EXPECT_TRUE(same_bits(trained(sluice::grad_scaler{}), trained(std::nullopt)));
}

TEST(torch_step, refuses_to_scale_gradients_that_are_not_there) {
  nn::Linear unused{5, 3}, used{5, 3};
  nn::Sequential model{unused, used};
  torch::optim::SGD optimizer{unused->parameters(), torch::optim::SGDOptions{0.1}};
  step step{model, optimizer, {.scaler = sluice::grad_scaler{}}};
  try {
    step([&](auto const& slices) { return F::cross_entropy(used->forward(slices[0]), slices[1]); },
         batch_of(4));
    ADD_FAILURE() << "it has been done";
  } catch (std::logic_error const& why) {
    EXPECT_THAT(why.what(),
                ::testing::StartsWith("No inf checks were recorded for this optimizer"));
  }
  EXPECT_EQ(step.stats().steps, 0);
}

}  // namespace
