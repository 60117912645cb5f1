/// One try at a slice of a global batch: forward, backward, and then commit or discard.
#include <ATen/autocast_mode.h>
#include <cxxabi.h>

#include <exception>
#include <string>
#include <utility>

#include "runtime/torch/step/detail/backward.hpp"
#include "runtime/torch/step/detail/engine.hpp"

namespace sluice::detail {
namespace {

/// How long one wait for a commit lasts.
constexpr std::uint32_t resolve_slice_ms = 50;

constexpr int taken_away = 0, deferred = 2;  // what commit_begin answers
constexpr int open = -1;                     // what commit_resolve answers: not yet

/// For a thread that is being cancelled, which must not throw anything else.
template <typename Work>
void unless_it_throws(Work const& work) noexcept {
  try {
    work();
  } catch (...) {  // nobody is left to hear of it
  }
}

/// The thread is in the arena.
class visit {
 public:
  visit(arena& of, std::int64_t samples) : arena_{of} { arena_.enter(samples); }
  ~visit() { arena_.leave(); }
  visit(visit const&) = delete;
  visit& operator=(visit const&) = delete;

 private:
  arena& arena_;
};

/// A commit that has begun. It ends with the object, also when something in it fails: then the
/// arena is kept.
class open_commit {
 public:
  open_commit(runtime_library const& runtime, std::int64_t samples)
      : runtime_{runtime}, samples_{samples} {}
  ~open_commit() { runtime_.commit_end(static_cast<std::uint32_t>(samples_), outlived ? 1 : 0); }
  open_commit(open_commit const&) = delete;
  open_commit& operator=(open_commit const&) = delete;

  bool outlived = true;

 private:
  runtime_library const& runtime_;
  std::int64_t samples_;
};

}  // namespace

contribution engine::forward_backward(step::loss_function const& loss_of, slice const& of,
                                      losses& into) {
  auto loss = loss_of(of.tensors);
  if (runtime_ != nullptr && !runtime_->sound()) {
    return {};  // backward would be for nothing
  }
  auto const earlier =
      knows_other_backward_ ? decltype(gradients_.earlier()){} : gradients_.earlier();
  auto const value = loss.loss.defined() ? loss.loss.detach() : loss.loss;
  auto made = into.backward(std::move(loss),
                            static_cast<double>(of.samples) / static_cast<double>(of.total),
                            scaler_ ? &*scaler_ : nullptr);
  if (!earlier.empty() && made.root.defined()) {
    look_at_other_backward(earlier, value, made);
  }
  return made;
}

/// The loss function has run a backward of its own; the first that does is looked at.
void engine::look_at_other_backward(
    std::vector<std::pair<torch::Tensor, torch::Tensor>> const& earlier, torch::Tensor const& loss,
    contribution const& made) {
  refuse_doubled(earlier, gradients_.with_gradients(), loss, made.root);
  knows_other_backward_ = runtime_ == nullptr || runtime_->sound();
}

void engine::rehearse(step::loss_function const& loss_of, slice const& few) {
  // What libraries and modules create once (workspaces, handles, cached masks) is then not born in
  // memory that is taken away, and lies close together.
  random_.save();
  buffers_.save();
  bool failed = false;
  try {
    backward_here const here{cuda_};
    losses forgotten{reduction_};
    static_cast<void>(forward_backward(loss_of, few, forgotten));
  } catch (abi::__forced_unwind const&) {
    unless_it_throws([this] { end_rehearsal(/*failed=*/true); });
    throw;  // the thread is being cancelled
  } catch (...) {
    failed = true;  // if it is not the small size that it minds, the first slice says so again
    failed_rehearsal_.remember(std::current_exception(), few.samples);
  }
  end_rehearsal(failed);
}

void engine::end_rehearsal(bool failed) {
  if (failed) {
    empty_backward_queue();
  }
  gradients_.forget();
  random_.restore();
  buffers_.restore();
  at::autocast::clear_cache();
  arena_->synchronize();
  arena_->empty_cache();
}

bool engine::try_slice(step::loss_function const& loss_of, slice const& of, losses& into,
                       update* last) {
  if (runtime_ != nullptr) {
    return try_in_arena(loss_of, of, into, last);
  }
  try_plainly(loss_of, of, into);
  return true;
}

void engine::try_plainly(step::loss_function const& loss_of, slice const& of, losses& into) {
  try {
    into.add(forward_backward(loss_of, of, into));
  } catch (...) {
    gradients_.forget();
    throw;
  }
}

contribution engine::forward_backward_in_arena(step::loss_function const& loss_of, slice const& of,
                                               losses& into) {
  backward_here const here{cuda_};
  visit const inside{*arena_, of.samples};
  return forward_backward(loss_of, of, into);
}

void engine::begin(slice const& of) {
  random_.save();
  buffers_.save();
  while (runtime_->commit_made(resolve_slice_ms) == 0) {  // the last one's
  }
  runtime_->begin(static_cast<std::uint32_t>(of.samples), static_cast<std::uint32_t>(of.total));
  begun_ = std::chrono::steady_clock::now();
}

bool engine::try_in_arena(step::loss_function const& loss_of, slice const& of, losses& into,
                          update* last) {
  begin(of);
  contribution made;
  std::exception_ptr failure;
  try {
    made = forward_backward_in_arena(loss_of, of, into);
  } catch (abi::__forced_unwind const&) {
    unless_it_throws([this] { give_up(); });
    throw;  // the thread is being cancelled
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure && runtime_->sound()) {  // its own: memory that has gone shows in the state alone
    give_up();
    std::rethrow_exception(failure);
  }
  if (made.part.defined() && commit(of, std::move(made), into, last)) {
    return true;
  }
  if (failure) {
    failure = nullptr;  // it may hold tensors
    empty_backward_queue();
  }
  made = {};
  discard(of);
  return false;
}

bool engine::commit(slice const& of, contribution made, losses& into, update* last) {
  auto const start = commit_begin();
  if (start == taken_away) {
    return false;
  }
  auto const sums = gradients_.state();
  auto const losses_before = into;
  auto const take_back = [&] {
    gradients_.put_back(sums);
    into = losses_before;
    if (last != nullptr) {
      last->take_back();
    }
  };
  arena::needed_bytes needed{};
  std::exception_ptr failure;
  bool counts = false;
  try {
    try {
      needed = copy_out(of, made);
      into.add(made);
      if (start == deferred && last != nullptr) {
        last->run();
      }
    } catch (abi::__forced_unwind const&) {
      throw;
    } catch (...) {
      failure = std::current_exception();
    }
    counts = resolved();
  } catch (abi::__forced_unwind const&) {
    unless_it_throws([&] {
      if (resolved()) {
        gradients_.forget();
        return;
      }
      take_back();
      made = {};
      failure = nullptr;  // it may hold tensors
      discard(of);
    });
    throw;  // the thread is being cancelled
  }
  if (!counts) {  // whatever has failed did so because of that
    take_back();
    return false;
  }
  if (failure) {
    gradients_.forget();
    std::rethrow_exception(failure);
  }
  std::chrono::duration<double> const took = std::chrono::steady_clock::now() - begun_;
  runtime_->plan_committed(static_cast<std::uint32_t>(of.samples), 0, needed.now, needed.at_first,
                           took.count());
  return true;
}

int engine::commit_begin() {
  try {
    return runtime_->commit_begin(gradients_.are_of_one_kind() ? 1 : 0);
  } catch (abi::__forced_unwind const&) {
    unless_it_throws([this] { give_up(); });
    throw;  // the thread is being cancelled
  }
}

arena::needed_bytes engine::copy_out(slice const& of, contribution& made) {
  open_commit commit{*runtime_, of.samples};
  made.part = made.part.clone();
  if (made.weight) {
    if (auto* const weight = std::get_if<torch::Tensor>(&*made.weight)) {
      *weight = weight->clone();
    }
  }
  made.root.reset();
  gradients_.take();
  if (!cuda_) {
    at::autocast::clear_cache();  // of an autocast that the user has entered around the step
  }
  commit.outlived = arena_->outlived();
  return arena_->needed();
}

bool engine::resolved() const {
  int counts = open;
  while (counts == open) {
    counts = runtime_->commit_resolve(resolve_slice_ms);
  }
  return counts == 1;
}

void engine::give_up() {
  empty_backward_queue();
  gradients_.forget();
  arena_->synchronize();  // what lies in the gate's queue when the micro-batch ends is dropped
  bool const sound = runtime_->sound();
  runtime_->discard();
  if (sound) {
    arena_->release();
  } else {
    arena_->release_all();
    buffers_.restore();
  }
}

void engine::discard(slice const& of) {
  auto const state = runtime_->arena_state();
  gradients_.forget();
  ++counts_.discards;
  in_vain_.discarded(counts_.commits, of.samples);
  runtime_->plan_discarded(static_cast<std::uint32_t>(of.samples), 0, state);
  runtime_->discard();
  arena_->release_all();
  at::autocast::clear_cache();
  random_.restore();
  buffers_.restore();
  if (auto const left = survivors(); left > 0) {
    throw survivors_error{std::to_string(left) +
                          " tensors of a discarded micro-batch are still referenced; the loss "
                          "function must not keep tensors beyond its run (copy them out with "
                          ".detach().clone(), or keep numbers from .item())"};
  }
}

std::uint64_t engine::survivors() {
  // Blocks that a side stream has used are only freed, and segments of a dropped pool only given
  // back, when torch's cache is emptied. cuBLAS keeps a workspace for a stream that the micro-batch
  // was the first to use.
  for (bool const workspaces : {false, true}) {
    if (runtime_->survivors() == 0) {
      return 0;
    }
    if (workspaces) {
      arena_->clear_workspaces();
    }
    arena_->empty_cache();
  }
  return runtime_->survivors();
}

}  // namespace sluice::detail
