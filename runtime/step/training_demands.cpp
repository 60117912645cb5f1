/// Training's memory: answering demands, on the control thread.

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/ledger/chunk_choice.hpp"
#include "runtime/step/training_memory.hpp"

namespace sluice::step {
namespace {

using memhandover::monotonic_ns;

/// How long the control thread waits for launches to end before it gives nothing: longer than any
/// unit it may meet. An operator on few processors may take many seconds.
constexpr std::int64_t kernel_patience_ns = 2'000'000'000;
constexpr std::int64_t operator_patience_ns = 60'000'000'000;
/// How often the control thread asks, while it waits for a commit, whether the server still waits for it.
constexpr std::chrono::milliseconds look_every{20};

std::uint32_t still_missing(std::uint32_t wanted, std::vector<std::uint32_t> const& given) {
  return wanted - std::min(wanted, static_cast<std::uint32_t>(given.size()));
}

/// Lets a lock go while it lives.
class unlocked {
 public:
  explicit unlocked(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  unlocked(unlocked const&) = delete;
  unlocked& operator=(unlocked const&) = delete;
  ~unlocked() { lock_.lock(); }

 private:
  std::unique_lock<std::mutex>& lock_;
};

}  // namespace

/// How many chunks `take_idle` would find.
std::uint32_t training_memory::idle() const {
  auto count = stock_->size();
  for (auto const* const candidate : {arena_.get(), persistent_.get()}) {
    count += candidate->revoked() ? 0 : candidate->idle_chunks();
  }
  return count;
}

/// Chunks that nothing uses: those without a mapping, then the idle ends of arena and persistent
/// memory.
void training_memory::take_idle(std::uint32_t count, std::vector<std::uint32_t>& given) {
  give_stock(count, given);
  auto missing = [&] { return still_missing(count, given); };
  given.reserve(given.size() + missing());  // no chunk is lost for want of room
  for (auto* candidate : {arena_.get(), persistent_.get()}) {
    if (missing() > 0 && !candidate->revoked()) {
      auto const idle = candidate->shrink(missing(), space::unmapping::soon);
      given.insert(given.end(), idle.begin(), idle.end());
    }
  }
}

/// `count` chunks of `from`, or all. It may be more, where only that makes the server find neighbours:
/// what it need not map at a second address it has at once.
std::vector<std::uint32_t> training_memory::choose(std::uint32_t count,
                                                   std::vector<std::uint32_t>& from,
                                                   std::vector<std::uint32_t> const& given) const {
  auto const& view = client_->view();
  std::vector<bool> free(view.shape().chunk_count);
  for (std::uint32_t chunk = 0; chunk < view.shape().chunk_count; ++chunk) {
    free[chunk] = view.chunk(chunk).is_free();
  }
  for (auto const chunk : given) {
    free.at(chunk) = true;
  }
  std::sort(from.begin(), from.end());
  return memhandover::choose_chunks_to_give(from, free, count);
}

void training_memory::give_stock(std::uint32_t count, std::vector<std::uint32_t>& given) {
  std::vector<std::uint32_t> here{stock_->chunks().begin(), stock_->chunks().end()};
  auto const chosen = choose(count, here, given);
  given.reserve(given.size() + chosen.size());
  stock_->remove(chosen);
  given.insert(given.end(), chosen.begin(), chosen.end());
}

memhandover::demand_answer training_memory::answer(memhandover::demand const& wanted) {
  auto* const gate = options_.gate;
  demands_waiting_.fetch_add(1);
  auto const passed = [this, gate, &wanted](training_memory*) {
    {
      std::lock_guard const lock{mutex_};
      demands_waiting_.fetch_sub(1);
    }
    demand_answered_.notify_all();
    if (gate != nullptr) {
      gate->demand_answered(wanted);
    }
  };
  // Whatever happens here, nobody stays held for it.
  std::unique_ptr<training_memory, decltype(passed)> const turn{this, passed};
  auto given = give_up(wanted);
  auto const seen = gate != nullptr ? gate->demand_seen_ns() : 0;
  given.noticed_ns = seen > 0 ? std::min(seen, wanted.awake_ns) : wanted.awake_ns;
  return given;
}

/// Whatever fails on the way, what has been taken until then is the server's.
memhandover::demand_answer training_memory::give_up(memhandover::demand const& wanted) {
  memhandover::demand_answer answer;
  std::unique_lock lock{mutex_};
  answer.closed_ns = answer.idle_ns = monotonic_ns();
  if (arena_ == nullptr) {
    return answer;  // still being set up: there is nothing to give
  }
  answer.afterwards = [this](std::span<std::uint32_t const> given) { finish_answer(given); };
  try {
    take_for(wanted, lock, answer);
  } catch (std::exception const& why) {
    spdlog::error("a demand could not be met in full reason=\"{}\"", why.what());
  }
  if (arena_ != nullptr) {
    publish();
  }
  return answer;
}

void training_memory::take_for(memhandover::demand const& wanted,
                               std::unique_lock<std::mutex>& lock,
                               memhandover::demand_answer& answer) {
  auto* const gate = options_.gate;
  stock_->collect();  // a thread may not have come back for it yet
  // What a commit may still need is not taken while that would not do.
  auto const unused_ones = [&] { return gate == nullptr ? idle() : stock_->size(); };
  bool const may_revoke = unused_ones() >= wanted.chunks || await_commit_end(lock, wanted);
  if (arena_ == nullptr) {
    return;  // it has all been given up meanwhile
  }
  ++demands_answered_;
  stock_->collect();
  answer.closed_ns = answer.idle_ns = monotonic_ns();
  if (gate == nullptr) {
    take_idle(wanted.chunks, answer.chunks);
  } else if (stock_->size() >= wanted.chunks) {
    give_stock(wanted.chunks, answer.chunks);
  }
  if (may_revoke && still_missing(wanted.chunks, answer.chunks) > 0 && !revocable().empty()) {
    try {
      revoke_behind_gate(wanted, lock, answer);
    } catch (std::exception const& why) {
      // What has been taken already is the server's; the arena is as it was.
      spdlog::error("the arena could not be taken away reason=\"{}\"", why.what());
    }
  }
  if (arena_ == nullptr) {
    return;
  }
  if (answer.chunks.empty()) {
    give_stock(wanted.chunks, answer.chunks);  // less than was asked for, but all there is
  }
  if (may_revoke && gate != nullptr) {
    // What the optimizer gives back and asks for again goes only where all the rest is too little.
    auto const missing = still_missing(wanted.chunks, answer.chunks);
    answer.chunks.reserve(answer.chunks.size() + missing);
    auto const rest = persistent_->shrink(missing);
    answer.chunks.insert(answer.chunks.end(), rest.begin(), rest.end());
  }
}

/// When the server need not wait for it.
void training_memory::finish_answer(std::span<std::uint32_t const> given) noexcept {
  if (!given.empty()) {
    std::lock_guard const lock{mutex_};
    history_->record(memhandover::chunk_event::given, given);
  }
  if (options_.gate == nullptr) {
    memory_->sweep();
  } else {
    finish_revocation();
  }
}

/// On CUDA: removes the mappings of what has been revoked, and opens the gate.
void training_memory::finish_revocation() noexcept {
  auto const unmap = [](std::unique_ptr<space> const& of) {
    bool const was_left = of->awaits_unmapping();
    of->finish_revoke();
    return was_left;
  };
  {
    std::lock_guard const lock{mutex_};
    if (arena_ == nullptr) {
      return;  // who ends waits for what is left to be unmapped
    }
    bool any = unmap(arena_);
    for (auto const& old : retired_) {
      any = unmap(old) || any;
    }
    if (!any) {
      return;
    }
    stock_->add(unmapping_);
    unmapping_.clear();
    if (arena_->revoked() && phase_ == phase::running) {
      abort_launches();  // if `discard` has been called already there is nothing left to abort
    }
    options_.gate->open();
    note_reopened(unmaps_used_);
    drop_empty(retired_);
    publish();
  }
  unmapped_.notify_all();
}

/// A commit is short, and what it adds up must not be lost. A compute pause holds nobody meanwhile. False: it waits
/// for memory that the server would have to give, or the server waits no longer.
bool training_memory::await_commit_end(std::unique_lock<std::mutex>& lock,
                                       memhandover::demand const& wanted) {
  if (phase_ != phase::committing) {
    return true;
  }
  auto const hurry = [this](bool on) {
    urgent_.store(on, std::memory_order_release);
    if (options_.gate != nullptr) {
      options_.gate->set_urgent(on);
    }
  };
  hurry(true);
  auto const ended = [this] { return phase_ != phase::committing; };
  auto const over = [&] { return ended() || holding_up_commits_ > 0; };
  while (!commit_changed_.wait_for(lock, look_every, over) && wanted.stands()) {
  }
  hurry(false);
  return ended();
}

/// What can be taken although it is in use: the arena, and on CUDA what a micro-batch that got too
/// little memory has left, until the last of its tensors is freed.
std::vector<memhandover::chunk_space*> training_memory::revocable() const {
  std::vector<space*> found;
  auto const consider = [&found](std::unique_ptr<space> const& candidate) {
    if (!candidate->chunks().empty()) {
      found.push_back(candidate.get());
    }
  };
  consider(arena_);
  std::for_each(retired_.begin(), retired_.end(), consider);
  return found;
}

/// Which of the revocable chunks go if all are taken and the server needs `count`. On CUDA those
/// without a mapping are taken into account as well, so that neighbours are found among all of them.
training_memory::division training_memory::divide(std::uint32_t count,
                                                  std::vector<std::uint32_t> const& given) const {
  division result;
  std::vector<std::uint32_t> all;
  for (auto const* const victim : revocable()) {
    all.insert(all.end(), victim->chunks().begin(), victim->chunks().end());
  }
  result.revocable = all.size();
  result.stock = stock_->size();
  result.generation = generation();
  if (options_.gate != nullptr) {
    all.insert(all.end(), stock_->chunks().begin(), stock_->chunks().end());
  }
  auto const chosen = choose(count, all, given);
  std::set_difference(all.begin(), all.end(), chosen.begin(), chosen.end(),
                      std::back_inserter(result.kept));
  result.given = given;
  result.given.insert(result.given.end(), chosen.begin(), chosen.end());
  if (phase_ == phase::running) {
    std::vector<bool> live(client_->view().shape().chunk_count);
    for (auto const chunk : arena_->chunks()) {
      live.at(chunk) = true;
    }
    result.live = static_cast<std::uint32_t>(
        std::count_if(result.given.begin(), result.given.end(),
                      [&live](std::uint32_t chunk) { return live.at(chunk); }));
  }
  return result;
}

launch_gate& training_memory::computing() noexcept {
  return options_.gate != nullptr ? *options_.gate : operators_;
}

void training_memory::note_reopened(bool in_use) noexcept {
  if (in_use) {
    reopened_ns_.store(monotonic_ns());
  }
}

/// Takes what is revocable, and tells whether the gate may be opened. On CUDA the mappings are removed, and the gate
/// opened, afterwards.
bool training_memory::revoke(division parts, memhandover::demand_answer& answer) {
  bool const on_host = options_.gate == nullptr;
  for (auto* const victim : revocable()) {
    victim->revoke(on_host);  // on the host there is one at most
  }
  // Nothing throws from here on: the memory has changed hands.
  bool const in_use = arena_->revoked() && phase_ == phase::running;
  if (arena_->revoked()) {
    state_.store(arena_state::revoked, std::memory_order_release);
  }
  if (in_use) {
    lost_ns_ = lost_ns_.value_or(answer.idle_ns);
  }
  answer.chunks = std::move(parts.given);
  answer.live_chunks = parts.live;
  if (on_host) {
    stock_->add(parts.kept);
    if (in_use) {
      notify_others();  // before anybody is granted more
    }
    return true;
  }
  stock_->clear();  // what is kept of it is among `kept`
  unmapping_ = std::move(parts.kept);
  unmaps_used_ = in_use;
  return false;
}

/// Closes the gate, waits until nothing runs, and takes what is revocable.
void training_memory::revoke_behind_gate(memhandover::demand const& wanted,
                                         std::unique_lock<std::mutex>& lock,
                                         memhandover::demand_answer& answer) {
  auto const count = still_missing(wanted.chunks, answer.chunks);
  auto* const gate = &computing();
  auto const deadline =
      monotonic_ns() + (options_.gate != nullptr ? kernel_patience_ns : operator_patience_ns);
  bool closed = false;
  auto const open = [&closed](launch_gate* of) {
    if (std::exchange(closed, false)) {
      of->open();
    }
  };
  // Whatever fails, nobody stays held.
  std::unique_ptr<launch_gate, decltype(open)> const at_end{gate, open};
  division parts;
  for (;;) {
    bool idle = false;
    {
      unlocked const meanwhile{lock};  // a thread inside a launch may need this lock to get out
      closed = gate->close(deadline);
      answer.closed_ns = monotonic_ns();
    }
    if (closed && arena_ != nullptr) {
      parts = divide(count, answer.chunks);  // while the device still runs
      unlocked const meanwhile{lock};
      idle = gate->wait_idle(deadline);
    }
    answer.idle_ns = monotonic_ns();
    answer.unit_ended_ns = idle ? gate->unit_ended_ns() : 0;
    if (!idle || arena_ == nullptr) {
      return;
    }
    if (phase_ != phase::committing) {
      break;
    }
    open(gate);
    if (!await_commit_end(lock, wanted) || arena_ == nullptr) {  // it began in between
      return;
    }
  }
  auto const victims = revocable();
  if (victims.empty()) {
    return;
  }
  // Memory is allocated and freed beside a closed gate as well.
  auto const chunks =
      std::accumulate(victims.begin(), victims.end(), std::size_t{0},
                      [](std::size_t sum, space* of) { return sum + of->chunks().size(); });
  bool const as_it_was = parts.revocable == chunks && parts.stock == stock_->size() &&
                         parts.generation == generation();
  bool const opens = revoke(as_it_was ? std::move(parts) : divide(count, answer.chunks), answer);
  if (opens) {
    open(gate);
    note_reopened(arena_->revoked() && phase_ == phase::running);
  }
  closed = false;
}

}  // namespace sluice::step
