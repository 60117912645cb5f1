/// One try at a slice of a global batch: forward, backward, and then commit or discard.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/core/AutogradState.h>
#include <cxxabi.h>

#include <exception>
#include <string>
#include <utility>

#include "runtime/torch/step/detail/engine.hpp"

namespace sluice::detail {
namespace {

/// How long one wait for a commit lasts.
constexpr std::uint32_t resolve_slice_ms = 50;

/// Autograd's thread of the device serves every backward of the process. In the step's own thread,
/// the arena and the gate know what belongs to the micro-batch, and leave what other threads train
/// alone.
class backward_here {
 public:
  explicit backward_here(bool cuda)
      : before_{c10::AutogradState::get_tls_state().get_multithreading_enabled()} {
    if (cuda) {
      set(false);
    }
  }
  ~backward_here() { set(before_); }
  backward_here(backward_here const&) = delete;
  backward_here& operator=(backward_here const&) = delete;

 private:
  static void set(bool enabled) {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(enabled);
  }

  bool before_;
};

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
  ~open_commit() {
    runtime_.commit_end(static_cast<std::uint32_t>(samples_), outlived ? 1 : 0);
    while (runtime_.commit_resolve(resolve_slice_ms) < 0) {  // it was not deferred: it counts
    }
  }
  open_commit(open_commit const&) = delete;
  open_commit& operator=(open_commit const&) = delete;

  bool outlived = true;

 private:
  runtime_library const& runtime_;
  std::int64_t samples_;
};

/// Autograd leaves nodes that were ready when another one threw in the thread's queue, with their
/// gradients and saved tensors, until the thread's next backward.
void empty_backward_queue() {
  at::AutoGradMode const with_grad{true};
  at::ones({}).requires_grad_().backward();
}

}  // namespace

contribution engine::forward_backward(step::loss_function const& loss_of, slice const& of,
                                      losses& into) const {
  auto loss = loss_of(of.tensors);
  if (runtime_ != nullptr && !runtime_->sound()) {
    return {};  // backward would be for nothing
  }
  return into.backward(std::move(loss),
                       static_cast<double>(of.samples) / static_cast<double>(of.total));
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
    throw;  // the thread is being cancelled
  } catch (...) {
    failed = true;  // if it is not the small size that it minds, the first slice says so again
  }
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

bool engine::try_slice(step::loss_function const& loss_of, slice const& of, losses& into) {
  if (runtime_ != nullptr) {
    return try_in_arena(loss_of, of, into);
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

bool engine::try_in_arena(step::loss_function const& loss_of, slice const& of, losses& into) {
  random_.save();
  buffers_.save();
  runtime_->begin(static_cast<std::uint32_t>(of.samples), static_cast<std::uint32_t>(of.total));
  begun_ = std::chrono::steady_clock::now();
  contribution made;
  std::exception_ptr failure;
  try {
    made = forward_backward_in_arena(loss_of, of, into);
  } catch (abi::__forced_unwind const&) {
    give_up();
    throw;  // the thread is being cancelled
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure && runtime_->sound()) {  // its own: memory that has gone shows in the state alone
    give_up();
    std::rethrow_exception(failure);
  }
  if (!failure && runtime_->sound() && commit(of, std::move(made), into)) {
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

bool engine::commit(slice const& of, contribution made, losses& into) {
  if (runtime_->commit_begin(0) == 0) {
    return false;
  }
  arena::needed_bytes needed{};
  try {
    open_commit commit{*runtime_, of.samples};
    copy_out(made);
    commit.outlived = arena_->outlived();
    needed = arena_->needed();
  } catch (...) {
    gradients_.forget();
    throw;
  }
  into.add(made);
  std::chrono::duration<double> const took = std::chrono::steady_clock::now() - begun_;
  runtime_->plan_committed(static_cast<std::uint32_t>(of.samples), needed.now, needed.at_first,
                           took.count());
  return true;
}

void engine::copy_out(contribution& made) {
  made.part = made.part.clone();
  if (made.weight) {
    if (auto* const weight = std::get_if<torch::Tensor>(&*made.weight)) {
      *weight = weight->clone();
    }
  }
  gradients_.take();
  if (!cuda_) {
    at::autocast::clear_cache();  // of an autocast that the user has entered around the step
  }
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
  runtime_->plan_discarded(static_cast<std::uint32_t>(of.samples), state);
  runtime_->discard();
  arena_->release_all();
  at::autocast::clear_cache();
  random_.restore();
  buffers_.restore();
  if (auto const left = survivors(); left > 0) {
    ++counts_.discards;
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
