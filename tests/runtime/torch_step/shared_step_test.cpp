/// What a step says to the runtime, and what it makes of the answers.
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <pthread.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/runtime/torch_step/shared_training.hpp"

using namespace sluice::testing;
using sluice::step;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

namespace {

class torch_step_shared : public shared_training {
 protected:
  template <typename Error, typename Work>
  static std::string complaint(Work&& work) {
    try {
      work();
    } catch (Error const& why) {
      return why.what();
    }
    return "nothing";
  }

  nn::Sequential model_ = mlp();
  torch::optim::SGD optimizer_ = sgd(*model_);
};

TEST_F(torch_step_shared, a_micro_batch_is_committed_outside_of_the_arena_and_at_once) {
  step step{model_, optimizer_, {.micro_batch = 3}};
  EXPECT_TRUE(step.shared());
  std::vector<std::int64_t> seen;
  std::vector<bool> inside;
  step(
      [&](auto const& slices) {
        seen.push_back(slices[0].size(0));
        inside.push_back(script_.inside);
        return F::cross_entropy(model_->forward(slices[0]), slices[1]);
      },
      batch_of(5));
  EXPECT_THAT(seen, ElementsAre(2, 3, 2));  // a rehearsal first
  EXPECT_THAT(inside, ElementsAre(false, true, true));
  EXPECT_THAT(script_.calls,
              ElementsAre("begin 3", "enter", "leave", "commit_begin, may defer", "commit_end 3",
                          "commit_resolve", "begin 2", "enter", "leave", "commit_begin, may defer",
                          "commit_end 2", "commit_resolve"));
}

TEST_F(torch_step_shared, gradients_do_not_stay_where_the_micro_batch_has_made_them) {
  step step{model_, optimizer_, {.micro_batch = 2}};
  auto const param = model_->parameters()[0];
  std::vector<void*> made;
  param.register_hook([&](torch::Tensor const& grad) { made.push_back(grad.data_ptr()); });
  step(cross_entropy_of(model_), batch_of(4));
  auto const* const kept = param.grad().data_ptr();
  EXPECT_THAT(made, ::testing::Each(::testing::Ne(kept)));
  step(cross_entropy_of(model_), batch_of(4));
  EXPECT_EQ(param.grad().data_ptr(), kept);
}

TEST_F(torch_step_shared, the_gradients_of_the_slices_are_those_of_the_batch) {
  auto const batch = batch_of(12);
  cross_entropy_of(model_)(batch).backward();
  std::vector<torch::Tensor> expected;
  for (auto const& param : model_->parameters()) {
    expected.push_back(param.grad().clone());
  }
  auto const gradients = [&](step::loss_function const& loss_of) {
    torch::optim::SGD idle{model_->parameters(), torch::optim::SGDOptions{0.0}};
    step step{model_, idle, {.micro_batch = 5}};
    script_.commits_refused = 1;
    step(loss_of, batch);
    std::vector<torch::Tensor> result;
    for (auto const& param : model_->parameters()) {
      result.push_back(param.grad());
    }
    return result;
  };
  EXPECT_TRUE(close(gradients(cross_entropy_of(model_)), expected));
  EXPECT_TRUE(close(gradients([&](auto const& slices) {
                      return std::pair{cross_entropy_of(model_)(slices), slices[0].size(0)};
                    }),
                    expected));
}

TEST_F(torch_step_shared, a_rehearsal_leaves_no_trace) {
  torch::manual_seed(0);
  auto model = restless_mlp();
  auto optimizer = sgd(*model);
  step step{model, optimizer};
  step(cross_entropy_of(model), batch_of(8));
  auto const next = torch::rand({1});

  torch::manual_seed(0);
  auto plain = restless_mlp();
  auto plain_optimizer = sgd(*plain);
  cross_entropy_of(plain)(batch_of(8)).backward();
  plain_optimizer.step();
  EXPECT_TRUE(same_bits(weights_of(*model), weights_of(*plain)));
  EXPECT_TRUE(torch::equal(torch::rand({1}), next));
}

TEST_F(torch_step_shared, a_rehearsal_may_fail) {
  step step{model_, optimizer_};
  step(
      [&](auto const& slices) {
        TORCH_CHECK(slices[0].size(0) > 2, "too few");
        return F::cross_entropy(model_->forward(slices[0]), slices[1]);
      },
      batch_of(4));
  EXPECT_EQ(step.stats().steps, 1);
}

TEST_F(torch_step_shared, an_error_of_the_loss_function_stays_one_and_the_step_has_not_happened) {
  step step{model_, optimizer_, {.micro_batch = 2}};
  auto const before = weights_of(*model_);
  int calls = 0;
  auto failing = [&](auto const& slices) {
    if (++calls == 3) {
      throw std::domain_error{"mine"};
    }
    return F::cross_entropy(model_->forward(slices[0]), slices[1]);
  };
  EXPECT_EQ(complaint<std::domain_error>([&] { step(failing, batch_of(4)); }), "mine");
  EXPECT_TRUE(same_bits(weights_of(*model_), before));
  EXPECT_EQ(step.stats().discards, 0);
  EXPECT_EQ(script_.calls.back(), "discard");
  EXPECT_FALSE(script_.inside);
  for (auto const& param : model_->parameters()) {
    EXPECT_FALSE(param.grad().defined());
  }
  EXPECT_NO_THROW(step(cross_entropy_of(model_), batch_of(4)));
}

TEST_F(torch_step_shared, a_forked_child_is_told_at_once_and_its_own_step_does_not_share) {
  step step{model_, optimizer_, {.micro_batch = 2}};
  auto const before = weights_of(*model_);
  int calls = 0;
  auto forking = [&](auto const& slices) {
    script_.inherited = ++calls == 3;  // the rehearsal, a slice, and one in which it forks
    script_.commits_refused = script_.inherited ? 1000 : 0;
    return F::cross_entropy(model_->forward(slices[0]), slices[1]);
  };
  auto const told = [&] {
    return complaint<sluice::step_error>([&] { step(forking, batch_of(4)); });
  };
  EXPECT_THAT(told(), HasSubstr("a forked child of a training process cannot train in the pool"));
  EXPECT_EQ(calls, 3);
  script_.inherited = true;
  EXPECT_THAT(told(), HasSubstr("make the model and its step in the child"));
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(same_bits(weights_of(*model_), before));
  ::testing::internal::CaptureStderr();
  sluice::step own{model_, optimizer_};
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("trains without sharing: a forked child of a training process"));
  EXPECT_FALSE(own.shared());
  own(cross_entropy_of(model_), batch_of(4));
  EXPECT_EQ(step.stats().steps, 0);
}

TEST_F(torch_step_shared, a_slice_becomes_smaller_when_memory_is_short) {
  step step{model_, optimizer_, {.micro_batch = 4}};
  script_.commits_refused = 1;
  step(cross_entropy_of(model_), batch_of(4));
  EXPECT_THAT(script_.planned, ElementsAre(4, 2, 2));
  EXPECT_EQ(step.stats().micro_batch, 2);
}

TEST_F(torch_step_shared, a_slice_stays_as_large_as_it_is_where_there_are_batch_statistics) {
  auto model = restless_mlp();
  auto optimizer = sgd(*model);
  step(model, optimizer, {.micro_batch = 2})(cross_entropy_of(model), batch_of(4));
  EXPECT_TRUE(script_.fixed);
  step(model, optimizer, {.micro_batch = 2, .adapt = true})(cross_entropy_of(model), batch_of(4));
  EXPECT_FALSE(script_.fixed);
  step(model_, optimizer_, {.micro_batch = 2})(cross_entropy_of(model_), batch_of(4));
  EXPECT_FALSE(script_.fixed);
}

TEST_F(torch_step_shared, steps_that_take_turns_begin_the_plan_anew) {
  step first{model_, optimizer_, {.micro_batch = 4}},
      second{model_, optimizer_, {.micro_batch = 2}};
  for (int turn = 0; turn < 2; ++turn) {
    first(cross_entropy_of(model_), batch_of(4));
    second(cross_entropy_of(model_), batch_of(4));
  }
  EXPECT_THAT(script_.planned, ElementsAre(4, 2, 2, 4, 2, 2));
}

TEST_F(torch_step_shared, memory_is_waited_for) {
  step step{model_, optimizer_};
  script_.needed_bytes = 500;
  script_.waits_in_vain = 3;
  step(cross_entropy_of(model_), batch_of(4));
  EXPECT_EQ(script_.waits_in_vain, 0);
  EXPECT_GT(step.stats().wait_seconds, 0);
}

TEST_F(torch_step_shared, what_can_never_fit_is_told_with_who_holds_the_memory) {
  step step{model_, optimizer_};
  script_.needed_bytes = 1500;
  script_.waits_in_vain = -1;
  auto const said =
      complaint<sluice::out_of_memory_error>([&] { step(cross_entropy_of(model_), batch_of(4)); });
  EXPECT_THAT(said, HasSubstr("a micro-batch of 1 samples needs more than the 1000 bytes that this "
                              "job could have of the pool's 2000"));
  EXPECT_THAT(said, HasSubstr("sluice: The script holds it all. Ask the test."));
}

TEST_F(torch_step_shared, what_torch_says_of_missing_memory_is_told_with_who_holds_it) {
  step step{model_, optimizer_};
  auto failing = [](auto const& /*slices*/) -> torch::Tensor {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "no more");
  };
  EXPECT_THAT(complaint<c10::OutOfMemoryError>([&] { step(failing, batch_of(4)); }),
              HasSubstr("sluice: The script holds it all."));
}

TEST_F(torch_step_shared, a_fault_after_a_discard_is_told_with_where_to_ask) {
  step step{model_, optimizer_};
  auto failing = [](auto const& /*slices*/) -> torch::Tensor {
    TORCH_CHECK(false, "CUDA error: an illegal memory access was encountered");
  };
  auto const asked = HasSubstr("sluice pool show");
  EXPECT_THAT(complaint<c10::Error>([&] { step(failing, batch_of(4)); }), ::testing::Not(asked));
  script_.commits_refused = 1;
  step(cross_entropy_of(model_), batch_of(4));
  EXPECT_THAT(complaint<c10::Error>([&] { step(failing, batch_of(4)); }), asked);
}

TEST_F(torch_step_shared, tensors_that_are_kept_from_a_discarded_micro_batch_are_refused) {
  step step{model_, optimizer_};
  script_.survivors = 2;
  EXPECT_NO_THROW(step(cross_entropy_of(model_), batch_of(4)));
  script_.commits_refused = 1;
  EXPECT_THAT(
      complaint<sluice::survivors_error>([&] { step(cross_entropy_of(model_), batch_of(4)); }),
      HasSubstr("2 tensors of a discarded micro-batch are still referenced"));
  EXPECT_EQ(step.stats().discards, 1);
}

TEST_F(torch_step_shared, sparse_gradients_are_refused_and_the_commit_has_ended) {
  nn::Embedding words{nn::EmbeddingOptions{10, 4}.sparse(true)};
  torch::optim::SGD optimizer{words->parameters(), torch::optim::SGDOptions{0.1}};
  step step{words, optimizer};
  EXPECT_THAT(complaint<sluice::step_error>([&] {
                step([&](auto const& slices) { return words->forward(slices[0]).sum(); },
                     {torch::arange(4)});
              }),
              HasSubstr("sparse"));
  EXPECT_EQ(script_.calls.back(), "commit_resolve");
  EXPECT_FALSE(words->weight.grad().defined());
}

TEST_F(torch_step_shared, a_closures_slices_may_be_discarded) {
  auto train = [&](int refused) {
    torch::manual_seed(0);
    auto model = mlp();
    torch::optim::LBFGS optimizer{model->parameters(), torch::optim::LBFGSOptions{0.5}.max_iter(3)};
    step step{model, optimizer, {.micro_batch = 4, .adapt = false}};
    script_.commits_refused = refused;
    step(cross_entropy_of(model), batch_of(12));
    EXPECT_EQ(step.stats().discards, refused);
    return weights_of(*model);
  };
  EXPECT_TRUE(same_bits(train(0), train(5)));
}

TEST_F(torch_step_shared, what_is_frozen_again_keeps_no_room_for_its_gradients) {
  step step{model_, optimizer_};
  step(cross_entropy_of(model_), batch_of(4));
  auto param = model_->parameters()[0];
  auto const sum = param.grad().storage().getWeakStorageImpl();
  step(cross_entropy_of(model_), batch_of(4));
  EXPECT_FALSE(sum.expired());
  param.requires_grad_(false);
  step(cross_entropy_of(model_), batch_of(4));
  EXPECT_TRUE(sum.expired());
}

/// As a parameter on a GPU looks, where there need be none.
torch::Tensor as_if_on_gpu() {
  c10::Storage nothing{c10::Storage::use_byte_size_t{}, 0,
                       c10::DataPtr{nullptr, c10::Device{c10::kCUDA, 0}}};
  return torch::Tensor{c10::make_intrusive<c10::TensorImpl>(
      std::move(nothing), c10::DispatchKeySet{c10::DispatchKey::CUDA},
      caffe2::TypeMeta::Make<float>())};
}

/// A model on the host whose optimizer has a frozen parameter first that lies on a GPU.
class torch_step_frozen_first : public torch_step_shared {
 protected:
  torch_step_frozen_first() {
    model_->register_parameter("frozen", frozen_, false);
    params_.insert(params_.begin(), frozen_);
  }

  torch::Tensor frozen_ = as_if_on_gpu();
  std::vector<torch::Tensor> params_ = model_->parameters();
};

TEST_F(torch_step_frozen_first,
       what_is_trained_says_where_it_shares_and_whether_commits_are_deferred) {
  torch::optim::SGD optimizer{params_, torch::optim::SGDOptions{0.1}};
  step step{model_, optimizer};
  EXPECT_TRUE(step.shared());
  step(cross_entropy_of(model_), batch_of(4));
  EXPECT_THAT(script_.calls, ::testing::Contains("commit_begin, may defer"));
}

TEST_F(torch_step_frozen_first, a_scale_lies_beside_what_is_trained) {
  sluice::grad_scaler scaler{{.init_scale = 4.0, .growth_interval = 1}};
  torch::optim::SGD optimizer{params_, torch::optim::SGDOptions{0.1}};
  step step{model_, optimizer, {.scaler = scaler}};
  step(cross_entropy_of(model_), batch_of(4));
  EXPECT_EQ(scaler.get_scale(), 8.0);
}

TEST_F(torch_step_frozen_first, no_commit_is_deferred_in_which_it_has_thawed) {
  torch::optim::SGD optimizer{params_, torch::optim::SGDOptions{0.1}};
  step step{model_, optimizer};
  step(
      [&](auto const& slices) {
        frozen_.requires_grad_(true);
        return cross_entropy_of(model_)(slices);
      },
      batch_of(4));
  EXPECT_THAT(script_.calls, ::testing::Contains("commit_begin"));
}

/// Runs it in a thread that ends inside of it, as one does that is cancelled.
void run_in_thread_that_ends(std::function<void()> work) {
  pthread_t thread{};
  auto const run = [](void* of) -> void* {
    (*static_cast<std::function<void()>*>(of))();
    ADD_FAILURE() << "the thread has not ended inside";
    return nullptr;
  };
  ASSERT_EQ(::pthread_create(&thread, nullptr, run, &work), 0);
  ASSERT_EQ(::pthread_join(thread, nullptr), 0);
}

/// Copying it ends the thread.
struct ending_state final : torch::optim::OptimizerParamState {
  [[nodiscard]] std::unique_ptr<OptimizerParamState> clone() const override {
    ::pthread_exit(nullptr);
  }
};

/// A training whose third step, in which the optimizer may run ahead, ends with its thread.
class torch_step_cancelled : public shared_training {
 protected:
  void SetUp() override {
    shared_training::SetUp();
    step_.emplace(model_, optimizer_);
    for (int i = 0; i < 2; ++i) {
      (*step_)(cross_entropy_of(model_), batch_of(8));
    }
    script_.calls.clear();
    random_before_ = random();
    buffers_before_ = copies_of(model_->buffers());
  }
  /// The device's answer to a commit that is deferred.
  void defer(std::int64_t counts) {
    script_.answers["commit_begin"] = {{2}};
    script_.answers["commit_resolve"] = {{counts}};
  }
  /// The thread ends in the first call of that name.
  void end_in(std::string const& call) {
    script_.before_call = [this, call] {
      if (!script_.calls.empty() && script_.calls.back().starts_with(call)) {
        script_.before_call = nullptr;
        ::pthread_exit(nullptr);
      }
    };
  }
  void step_in_thread_that_ends() {
    run_in_thread_that_ends([this] { (*step_)(cross_entropy_of(model_), batch_of(8)); });
  }
  /// How often the optimizer has run, as far as it knows.
  std::int64_t optimizer_steps() {
    auto const& state = *optimizer_.state().at(model_->parameters()[0].unsafeGetTensorImpl());
    return static_cast<torch::optim::AdamParamState const&>(state).step();
  }
  void expect_nothing_left() {
    EXPECT_TRUE(torch::equal(random(), random_before_));
    EXPECT_TRUE(same_bits(copies_of(model_->buffers()), buffers_before_));
    expect_no_gradients();
    EXPECT_FALSE(script_.inside);
  }
  void expect_no_gradients() {
    for (auto const& param : model_->parameters()) {
      EXPECT_FALSE(param.grad().defined());
    }
  }
  static std::vector<torch::Tensor> copies_of(std::vector<torch::Tensor> const& tensors) {
    std::vector<torch::Tensor> result;
    for (auto const& tensor : tensors) {
      result.push_back(tensor.detach().clone());
    }
    return result;
  }
  static torch::Tensor random() { return at::detail::getDefaultCPUGenerator().get_state().clone(); }

  nn::Sequential model_ = restless_mlp();
  torch::optim::Adam optimizer_{model_->parameters()};
  std::optional<step> step_;
  torch::Tensor random_before_;
  std::vector<torch::Tensor> buffers_before_;
};

TEST_F(torch_step_cancelled,
       before_its_optimizer_has_run_in_a_commit_that_is_dropped_leaves_nothing) {
  defer(0);
  int key = 0;
  optimizer_.state()[&key] = std::make_unique<ending_state>();
  step_in_thread_that_ends();
  optimizer_.state().erase(&key);
  EXPECT_THAT(script_.calls,
              ElementsAre("begin 8", "enter", "leave", "commit_begin, may defer", "commit_end 8",
                          "commit_resolve", "plan_discarded, revoked", "discard"));
  EXPECT_EQ(step_->stats().discards, 1);
  expect_nothing_left();
}

TEST_F(torch_step_cancelled, while_it_waits_for_a_commit_that_is_dropped_leaves_nothing) {
  defer(0);
  end_in("commit_resolve");
  step_in_thread_that_ends();
  EXPECT_THAT(script_.calls, ElementsAre("begin 8", "enter", "leave", "commit_begin, may defer",
                                         "commit_end 8", "commit_resolve", "commit_resolve",
                                         "plan_discarded, revoked", "discard"));
  EXPECT_EQ(optimizer_steps(), 2);
  expect_nothing_left();
  (*step_)(cross_entropy_of(model_), batch_of(8));
  EXPECT_EQ(optimizer_steps(), 3);
}

TEST_F(torch_step_cancelled, in_a_commit_that_is_dropped_leaves_nothing_although_tensors_live_on) {
  defer(0);
  script_.survivors = 2;
  end_in("commit_resolve");
  step_in_thread_that_ends();
  EXPECT_EQ(script_.calls.back(), "discard");
  expect_nothing_left();
}

TEST_F(torch_step_cancelled,
       while_it_waits_for_a_commit_that_counts_leaves_what_the_optimizer_did) {
  defer(1);
  end_in("commit_resolve");
  step_in_thread_that_ends();
  EXPECT_EQ(script_.calls.back(), "commit_resolve");
  EXPECT_EQ(step_->stats().discards, 0);
  EXPECT_EQ(optimizer_steps(), 3);
  expect_no_gradients();
}

TEST_F(torch_step_cancelled, before_a_commit_begins_leaves_no_micro_batch) {
  end_in("commit_begin");
  step_in_thread_that_ends();
  EXPECT_THAT(script_.calls,
              ElementsAre("begin 8", "enter", "leave", "commit_begin, may defer", "discard"));
  expect_no_gradients();
}

TEST_F(torch_step_cancelled, in_a_rehearsal_leaves_nothing) {
  step other{model_, optimizer_};
  run_in_thread_that_ends([&] {
    other(
        [&](auto const& slices) -> torch::Tensor {
          model_->forward(slices[0]);
          ::pthread_exit(nullptr);
        },
        batch_of(8));
  });
  EXPECT_THAT(script_.calls, ElementsAre());
  expect_nothing_left();
}

}  // namespace
