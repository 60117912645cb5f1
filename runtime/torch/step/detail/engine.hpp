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
#include "runtime/torch/step/detail/trouble.hpp"
#include "runtime/torch/step/detail/update.hpp"
#include "runtime/torch/step/sluice/step.hpp"

namespace sluice::detail {

/// Number of samples of a batch. Throws std::invalid_argument if it has none, or its tensors
/// disagree.
[[nodiscard]] std::int64_t samples_of(step::tensors const& batch);

/// The micro-batches of one model's training. One slice goes
///
///   made ─► running ─► deferred ─► committed
///              │ ├────────│──────────┘ at once, where launches are not queued
///              │ └────────┴────► discarded ─► made
///              └──────► failed: the loss function threw although its memory was there
///
/// Not thread-safe.
class engine {
 public:
  /// `options` are checked by the caller.
  engine(torch::nn::Module const& model, torch::optim::Optimizer const& optimizer,
         step_options const& options);

  /// Runs every slice of a batch until it is committed, the first time after a rehearsal on two
  /// samples, which counts for nothing. Adds their losses up in `into`. The sums of the gradients
  /// are finished then, unless `last` has used them.
  ///
  /// `last`: what follows, to be run by the last try before it is known to count, where that can be;
  /// null: nothing.
  void run(step::loss_function const& loss_of, step::tensors const& batch, losses& into,
           update* last = nullptr);
  /// Whether `run` can be given what follows: the first steps make the optimizer's state.
  [[nodiscard]] bool may_run_ahead() const;
  /// To be called by what follows, before it has gradients shown.
  void finish_gradients() { gradients_.finish(); }
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
  void end_rehearsal(bool failed);
  /// False: the slice has been discarded.
  [[nodiscard]] bool try_slice(step::loss_function const& loss_of, slice const& of, losses& into,
                               update* last);
  void try_plainly(step::loss_function const& loss_of, slice const& of, losses& into);
  [[nodiscard]] bool try_in_arena(step::loss_function const& loss_of, slice const& of, losses& into,
                                  update* last);
  void begin(slice const& of);
  [[nodiscard]] contribution forward_backward(step::loss_function const& loss_of, slice const& of,
                                              losses& into);
  void look_at_other_backward(std::vector<std::pair<torch::Tensor, torch::Tensor>> const& earlier,
                              torch::Tensor const& loss, contribution const& made);
  [[nodiscard]] contribution forward_backward_in_arena(step::loss_function const& loss_of,
                                                       slice const& of, losses& into);
  /// False: nothing has changed, because the memory had gone when the slice's turn came.
  [[nodiscard]] bool commit(slice const& of, contribution made, losses& into, update* last);
  /// What the runtime answers. Only what is done on GPUs alone can be dropped, and so deferred.
  [[nodiscard]] int commit_begin();
  /// Between the beginning and the end of a commit. Returns what the micro-batch has needed.
  arena::needed_bytes copy_out(slice const& of, contribution& made);
  /// Whether the commit counts.
  [[nodiscard]] bool resolved() const;
  void give_up();
  void discard(slice const& of);
  [[nodiscard]] std::uint64_t survivors();

  torch::nn::Module const& model_;
  torch::optim::Optimizer const& optimizer_;
  std::optional<std::int64_t> micro_batch_;
  reduction reduction_;
  std::optional<grad_scaler> scaler_;
  bool cuda_;
  runtime_library const* runtime_;  ///< null: plain libtorch, and no arena
  std::unique_ptr<arena> arena_;
  random_state random_;
  buffers buffers_;
  gradients gradients_;
  planner planner_;
  bool rehearsed_;
  bool running_ = false;  ///< a micro-batch runs
  /// Whether a loss function has been seen that runs backward for something else than its loss.
  bool knows_other_backward_ = false;
  tries_in_vain in_vain_;
  failed_rehearsal failed_rehearsal_;
  std::chrono::steady_clock::time_point begun_{};
  step_stats counts_;
};

}  // namespace sluice::detail
