#include "runtime/step/training_memory.hpp"

#include <spdlog/spdlog.h>

#include <exception>
#include <utility>

namespace sluice::step {

using memhandover::unparkable;

training_memory::training_memory(options how)
    : options_(std::move(how)),
      cycle_(mutex_, options_.gate, computing(),
             [this](bool outlived) { keep_what_outlived(outlived); }),
      answers_(mutex_, cycle_, options_.gate, computing()) {
  client_ = memhandover::tenant_client::join(
      options_.broker, options_.kind, options_.name,
      [this](memhandover::demand const& wanted) { return answers_.answer(wanted); }, options_.wish);
  try {
    std::lock_guard const lock{mutex_};
    memory_ = memhandover::open_device_memory(client_->view().shape(), client_->files().chunks,
                                              options_.driver);
    history_.emplace(client_->view(), client_->slot());
    spaces_.emplace(*client_, *memory_, *history_,
                    training_spaces::options{.alignment = options_.alignment,
                                             .persistent = options_.persistent,
                                             .on_gpu = on_gpu()});
    answers_.serve_from(*spaces_, *memory_, *history_);
    auto* const copies = client_->copies();
    auto const why = options_.why_unparkable != unparkable::none ? options_.why_unparkable
                     : copies == nullptr                         ? unparkable::no_host_copies
                                                                 : unparkable::pinning;
    client_->mailbox().why_unparkable.store(static_cast<std::uint32_t>(why));
    client_->mailbox().longest_absence_ns.store(
        options_.longest_absence.value_or(std::chrono::nanoseconds::zero()).count());
    if (why == unparkable::pinning) {
      make_parkable(*copies);
    }
  } catch (...) {
    client_.reset();  // its thread uses what is destroyed with this object
    throw;
  }
}

training_memory::~training_memory() {
  {
    std::unique_lock lock{mutex_};
    answers_.stop(lock);
    if (parking_ != nullptr) {
      parking_->stop(lock);
    }
    cycle_.end();
  }
  cycle_.notify();
  spaces_.reset();
  client_.reset();  // ends the thread that uses what is destroyed next
}

/// The client keeps it, and ends it before the host copies.
void training_memory::make_parkable(memhandover::host_copy_share& copies) {
  auto const parking = std::make_shared<job_parking>(job_parking::parts{
      mutex_, computing(), *client_, copies, *memory_, *spaces_, options_.driver,
      options_.longest_absence, options_.kind == memhandover::client_kind::engine});
  parking_ = parking.get();
  operators_.on_held_parked([this] {
    want_parked();
    note_held("an operator", memhandover::monotonic_ns());
  });
  answers_.park_with(*parking_);
  client_->meanwhile([this, parking] {
    if (parking->has_order()) {
      answers_.obey_operator(*client_);
    }
    return parking->advance();
  });
}

launch_gate& training_memory::computing() noexcept {
  return options_.gate != nullptr ? *options_.gate : operators_;
}

void training_memory::begin() {
  cycle_.await_last();
  std::lock_guard const lock{mutex_};
  if (spaces_->arena().is_lost()) {
    spaces_->retire_arena();
    cycle_.end_abort();  // the last micro-batch was left without a word
  }
  spaces_->tidy();
  cycle_.begin();
  peak_ = spaces_->arena().ranges().used();
  began_empty_ = peak_ == 0;
}

commit_start training_memory::commit_begin(bool may_defer) {
  return cycle_.commit_begin(may_defer);
}

void training_memory::commit_end(bool outlived) {
  cycle_.commit_end(outlived);
}

std::optional<bool> training_memory::commit_resolve(std::int64_t deadline_ns) {
  return cycle_.commit_resolve(deadline_ns);
}

bool training_memory::await_commit(std::int64_t deadline_ns) {
  return cycle_.await_commit(deadline_ns);
}

void training_memory::work_together(bool together) {
  cycle_.work_together(together);
}

bool training_memory::end_with(void* communicator) {
  return cycle_.end_with(communicator);
}

void training_memory::drop_micro_batch(std::function<bool()> const& is_running) {
  cycle_.drop(is_running);
}

/// When a commit has been made; mutex_ is held. On the host every tensor is an allocation of its own, so one that is left
/// outlives its micro-batch. On CUDA what is left are the segments that torch's allocator keeps for the next one, and only
/// torch knows whether something lives in them.
void training_memory::keep_what_outlived(bool outlived) noexcept {
  spaces_->count_turn();
  if ((!on_gpu() || outlived) && spaces_->arena().ranges().live() > 0) {
    try {
      spaces_->promote_arena();
    } catch (std::exception const& why) {
      spdlog::error("what has outlived a micro-batch stays in the arena reason=\"{}\"", why.what());
    }
  }
  spaces_->publish();
}

void training_memory::discard() {
  {
    std::lock_guard const lock{mutex_};
    cycle_.discard_begin();
    try {
      if (spaces_->arena().is_lost()) {
        spaces_->retire_arena();
      } else if (!on_gpu() && spaces_->arena().ranges().live() > 0) {
        spaces_->promote_arena();
      }
    } catch (std::exception const& why) {
      // A lost one `begin` replaces.
      spdlog::error("the arena could not be replaced reason=\"{}\"", why.what());
    }
    bool const lost_still = spaces_->arena().is_lost();
    if (auto const lost = cycle_.discard_end(!lost_still)) {
      client_->mailbox().discarded_ns.fetch_add(static_cast<std::uint64_t>(lost->count()));
    }
    spaces_->publish();
    if (!lost_still) {
      cycle_.end_abort();
    }
  }
  cycle_.notify();
}

bool training_memory::owns(void const* address) const {
  std::lock_guard const lock{mutex_};
  return spaces_->owns(address);
}

bool training_memory::is_former(void const* address) const {
  std::lock_guard const lock{mutex_};
  return spaces_->is_former(address);
}

std::pair<std::byte*, std::size_t> training_memory::persistent_range(std::byte* address) const {
  std::lock_guard const lock{mutex_};
  return spaces_->persistent_range(address);
}

std::uint64_t training_memory::survivors() const {
  std::lock_guard const lock{mutex_};
  return spaces_->survivors();
}

std::uint64_t training_memory::peak_bytes() const {
  std::lock_guard const lock{mutex_};
  return peak_;
}

std::uint64_t training_memory::starved_bytes() const {
  std::lock_guard const lock{mutex_};
  return starved_bytes_;
}

void training_memory::publish_stranded() const {
  std::lock_guard const lock{mutex_};
  spaces_->publish_stranded();
}

void training_memory::leave() {
  {
    std::lock_guard const lock{mutex_};
    if (parking_ != nullptr) {
      parking_->leave();
    }
  }
  client_->leave();
}

void training_memory::before_fork() {
  std::unique_lock lock{mutex_};
  if (parking_ != nullptr) {
    parking_->await_resident(lock);
  }
  lock.release();  // until after the fork
  fork_copies_.make(*spaces_);
}

void training_memory::after_fork_in_parent() {
  fork_copies_.drop();
  mutex_.unlock();
}

void training_memory::after_fork_in_child() {
  fork_copies_.put_in_place();
  client_->abandon_in_child();
  mutex_.unlock();
}

}  // namespace sluice::step
