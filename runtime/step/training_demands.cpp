/// Training's memory: answering demands, on the control thread.

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>

#include "memhandover/chunk_choice.hpp"
#include "memhandover/error.hpp"
#include "runtime/step/training_memory.hpp"

namespace sluice::step {
namespace {

using memhandover::monotonic_ns;

/// How long the control thread waits for launches to end before it gives nothing: longer than any
/// unit it may meet.
constexpr std::int64_t drain_patience_ns = 2'000'000'000;

std::uint32_t still_missing(std::uint32_t wanted, std::vector<std::uint32_t> const& given) {
  return wanted - std::min(wanted, static_cast<std::uint32_t>(given.size()));
}

}  // namespace

/// Chunks that nothing uses: those without a mapping, then the idle ends of arena and persistent
/// memory.
void training_memory::take_idle(std::uint32_t count, std::vector<std::uint32_t>& given) {
  give_stock(count, given);
  auto missing = [&] { return still_missing(count, given); };
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
  tell_history(given);
  return given;
}

/// Has the history told what goes, when the server need not wait for it.
void training_memory::tell_history(memhandover::demand_answer& of) {
  of.afterwards = [this, given = of.chunks, others = std::move(of.afterwards)] {
    {
      std::lock_guard const lock{mutex_};
      history_->tell(memhandover::happening::given, given);
    }
    if (others) {
      others();
    }
  };
}

memhandover::demand_answer training_memory::give_up(memhandover::demand const& wanted) {
  memhandover::demand_answer answer;
  std::unique_lock lock{mutex_};
  if (arena_ == nullptr) {
    answer.closed_ns = answer.idle_ns = monotonic_ns();
    return answer;  // still being set up: there is nothing to give
  }
  await_commit_end(lock);
  ++demands_answered_;
  stock_->collect();  // a thread may not have come back for it yet
  auto* const gate = options_.gate;
  answer.closed_ns = answer.idle_ns = monotonic_ns();
  if (gate == nullptr) {
    take_idle(wanted.chunks, answer.chunks);
    answer.afterwards = [this] { memory_->sweep(); };
  } else if (stock_->size() >= wanted.chunks) {
    give_stock(wanted.chunks, answer.chunks);
  }
  auto const missing = still_missing(wanted.chunks, answer.chunks);
  if (missing > 0 && !arena_->chunks().empty() && !arena_->revoked()) {
    try {
      if (gate == nullptr) {
        revoke_arena(divide(missing, answer.chunks), answer);
      } else {
        take_arena_behind_gate(missing, lock, answer);
      }
    } catch (error const& why) {
      // What has been taken already is the server's; the arena is as it was.
      spdlog::error("the arena could not be taken away reason=\"{}\"", why.what());
    }
  }
  if (answer.chunks.empty()) {
    give_stock(wanted.chunks, answer.chunks);  // less than was asked for, but all there is
  }
  publish();
  return answer;
}

/// A commit is short, and what it adds up must not be lost. A compute pause lets it through meanwhile.
void training_memory::await_commit_end(std::unique_lock<std::mutex>& lock) {
  if (phase_ != phase::committing) {
    return;
  }
  auto const hurry = [this](bool on) {
    urgent_.store(on, std::memory_order_release);
    if (options_.gate != nullptr) {
      options_.gate->set_urgent(on);
    }
  };
  hurry(true);
  commit_ended_.wait(lock, [this] { return phase_ != phase::committing; });
  hurry(false);
}

/// Which of the arena's chunks go if the arena is taken and the server needs `count`. On CUDA those
/// without a mapping are taken into account as well, so that neighbours are found among all of them.
training_memory::division training_memory::divide(std::uint32_t count,
                                                  std::vector<std::uint32_t> const& given) const {
  division result;
  result.arena = arena_->chunks().size();
  result.stock = stock_->size();
  result.generation = generation();
  std::vector<std::uint32_t> all{arena_->chunks().begin(), arena_->chunks().end()};
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

/// Takes the arena. On CUDA the mappings are removed, and the gate opened, afterwards.
void training_memory::revoke_arena(division parts, memhandover::demand_answer& answer) {
  auto* const gate = options_.gate;
  auto* const victim = arena_.get();
  victim->revoke(gate == nullptr);
  state_.store(arena_state::revoked, std::memory_order_release);
  answer.chunks = std::move(parts.given);
  answer.live_chunks = parts.live;
  auto& kept = parts.kept;
  if (gate == nullptr) {
    stock_->add(kept);
    return;
  }
  stock_->clear();  // what is kept of it is among `kept`
  unmapping_ = static_cast<std::uint32_t>(kept.size());
  answer.afterwards = [this, victim, gate, kept = std::move(kept)] {
    {
      std::lock_guard const again{mutex_};
      victim->finish_revoke();
      stock_->add(kept);
      unmapping_ = 0;
      if (arena_.get() == victim && phase_ == phase::running) {
        gate->abort_begin();  // until `discard`; if that has been called already there is nothing
                              // left to abort
      }
      gate->open();
      drop_empty(retired_);
      publish();
    }
    unmapped_.notify_all();
  };
}

/// Closes the gate, waits until nothing runs, and takes the arena.
void training_memory::take_arena_behind_gate(std::uint32_t count,
                                             std::unique_lock<std::mutex>& lock,
                                             memhandover::demand_answer& answer) {
  auto* const gate = options_.gate;
  auto const deadline = monotonic_ns() + drain_patience_ns;
  division parts;
  for (;;) {
    lock.unlock();  // a thread inside a launch may need this lock to get out
    bool const closed = gate->close(deadline);
    answer.closed_ns = monotonic_ns();
    if (closed) {
      lock.lock();
      parts = divide(count, answer.chunks);  // while the device still runs
      lock.unlock();
    }
    bool const idle = closed && gate->wait_idle(deadline);
    answer.idle_ns = monotonic_ns();
    answer.unit_ended_ns = idle ? gate->unit_ended_ns() : 0;
    lock.lock();
    if (closed && idle && phase_ != phase::committing) {
      break;
    }
    if (closed) {
      gate->open();
    }
    if (!closed || !idle) {
      return;
    }
    await_commit_end(lock);  // it began in between
  }
  if (arena_->chunks().empty() || arena_->revoked()) {
    gate->open();
    return;
  }
  // Memory is allocated beside a closed gate as well.
  bool const as_it_was = parts.arena == arena_->chunks().size() && parts.stock == stock_->size() &&
                         parts.generation == generation();
  revoke_arena(as_it_was ? std::move(parts) : divide(count, answer.chunks), answer);
}

}  // namespace sluice::step
