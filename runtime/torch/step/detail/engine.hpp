/// Runs global batches in micro-batches, and adds their gradients up; what comes after is the
/// caller's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/torch/step/detail/arena.hpp"
#include "runtime/torch/step/detail/buffers.hpp"
#include "runtime/torch/step/detail/gradients.hpp"
#include "runtime/torch/step/detail/losses.hpp"
#include "runtime/torch/step/detail/planner.hpp"
#include "runtime/torch/step/detail/random_state.hpp"
#include "runtime/torch/step/detail/runtime_library.hpp"
#include "runtime/torch/step/sluice/step.hpp"

namespace sluice::detail {

/// Number of samples of a batch. Throws std::invalid_argument if it has none, or its tensors
/// disagree.
[[nodiscard]] std::int64_t samples_of(step::tensors const& batch);

/// The micro-batches of one model's training. One slice goes
///
///   made ─► running ─► committed
///              │ └────► discarded ─► made
///              └──────► failed: the loss function threw although its memory was there
///
/// Not thread-safe.
class engine {
 public:
  /// `options` are checked by the caller.
  engine(torch::nn::Module const& model, torch::optim::Optimizer const& optimizer,
         step_options const& options);

  /// Runs every slice of a batch until it is committed, the first time after a rehearsal on two
  /// samples, which counts for nothing. The sums of the gradients are finished then.
  [[nodiscard]] losses run(step::loss_function const& loss_of, step::tensors const& batch);
  /// Gives the parameters the gradients of the batch, and the optimizer the memory that it may need
  /// for the first times.
  void show_gradients(losses const& of);
  /// A global batch has been trained.
  void count_step(step::tensors const& batch);
  /// Adds to the message of torch's exceptions what the pool knows of their cause.
  void explain(c10::Error& why) const;

  [[nodiscard]] bool shared() const { return runtime_ != nullptr; }
  [[nodiscard]] step_stats stats() const;

 private:
  struct slice {
    step::tensors tensors;
    std::int64_t samples;
    std::int64_t total;  ///< samples of its batch
  };

  /// `samples` samples of a batch from `start` on, as views.
  [[nodiscard]] static slice cut(step::tensors const& batch, std::int64_t start,
                                 std::int64_t samples, std::int64_t total);
  void refuse_child() const;
  void rehearse(step::loss_function const& loss_of, slice const& few);
  /// False: the slice has been discarded.
  [[nodiscard]] bool try_slice(step::loss_function const& loss_of, slice const& of, losses& into);
  void try_plainly(step::loss_function const& loss_of, slice const& of, losses& into);
  [[nodiscard]] bool try_in_arena(step::loss_function const& loss_of, slice const& of,
                                  losses& into);
  [[nodiscard]] contribution forward_backward(step::loss_function const& loss_of, slice const& of,
                                              losses& into) const;
  [[nodiscard]] contribution forward_backward_in_arena(step::loss_function const& loss_of,
                                                       slice const& of, losses& into);
  /// False: nothing has changed, because the memory had gone when the slice's turn came.
  [[nodiscard]] bool commit(slice const& of, contribution made, losses& into);
  void copy_out(contribution& made);
  void give_up();
  void discard(slice const& of);
  [[nodiscard]] std::uint64_t survivors();

  torch::nn::Module const& model_;
  torch::optim::Optimizer const& optimizer_;
  std::optional<std::int64_t> micro_batch_;
  reduction reduction_;
  bool cuda_;
  runtime_library const* runtime_;  ///< null: plain libtorch, and no arena
  std::unique_ptr<arena> arena_;
  random_state random_;
  buffers buffers_;
  gradients gradients_;
  planner planner_;
  bool rehearsed_;
  bool running_ = false;  ///< a micro-batch runs
  std::chrono::steady_clock::time_point begun_{};
  step_stats counts_;
};

}  // namespace sluice::detail
