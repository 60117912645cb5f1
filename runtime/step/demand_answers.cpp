#include "runtime/step/demand_answers.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <memory>
#include <numeric>
#include <utility>

#include "memhandover/ledger/chunk_counts.hpp"
#include "memhandover/ledger/ledger.hpp"

namespace sluice::step {
namespace {

using memhandover::monotonic_ns;

/// How often the control thread asks, while it waits for a commit, whether the server still waits for it.
constexpr std::chrono::milliseconds look_every{20};
/// How long an allocation lets a demand go first.
constexpr std::chrono::milliseconds demand_patience{2000};

std::uint32_t still_missing(std::uint32_t wanted, std::vector<std::uint32_t> const& given) {
  return wanted - std::min(wanted, static_cast<std::uint32_t>(given.size()));
}

/// Lets a lock go while it lives.
class unlocked {
 public:
  explicit unlocked(demand_answers::lock_type& lock) : lock_(lock) { lock_.unlock(); }
  unlocked(unlocked const&) = delete;
  unlocked& operator=(unlocked const&) = delete;
  ~unlocked() { lock_.lock(); }

 private:
  demand_answers::lock_type& lock_;
};

}  // namespace

demand_answers::demand_answers(std::mutex& mutex, micro_batch_cycle& cycle, launch_gate* gate,
                               launch_gate& computing)
    : mutex_(mutex), cycle_(cycle), gate_(gate), computing_(computing) {}

void demand_answers::serve_from(training_spaces& spaces, memhandover::device_memory& memory,
                                memhandover::chunk_history& history) noexcept {
  spaces_ = &spaces;
  memory_ = &memory;
  history_ = &history;
}

void demand_answers::stop(lock_type& lock) {
  unmapped_.wait(lock, [this] { return !spaces_->awaits_unmapping(); });
  spaces_ = nullptr;
}

void demand_answers::await_stock(lock_type& lock) {
  unmapped_.wait(lock, [this] { return !spaces_->unmapping(); });
}

void demand_answers::let_pass(lock_type& lock) {
  // On the host the demand may be waiting for the operator that allocates here.
  if (!micro_batch_cycle::committing() && gate_ != nullptr) {
    (void)cycle_.wait_for(lock, demand_patience,
                          [this] { return waiting_ == 0 || cycle_.is_committing(); });
  }
}

memhandover::demand_answer demand_answers::answer(memhandover::demand const& wanted) {
  waiting_.fetch_add(1);
  auto const passed = [this, &wanted](demand_answers*) {
    {
      std::lock_guard const lock{mutex_};
      waiting_.fetch_sub(1);
    }
    cycle_.notify();
    if (gate_ != nullptr) {
      gate_->demand_answered(wanted);
    }
  };
  // Whatever happens here, nobody stays held for it.
  std::unique_ptr<demand_answers, decltype(passed)> const turn{this, passed};
  auto given = give_up(wanted);
  auto const seen = gate_ != nullptr ? gate_->demand_seen_ns() : 0;
  given.noticed_ns = seen > 0 ? std::min(seen, wanted.awake_ns) : wanted.awake_ns;
  return given;
}

void demand_answers::obey_operator(memhandover::tenant_client& client) {
  auto const& demanded = client.view().controls()[client.slot()].demand;
  memhandover::demand const wanted{
      .chunks = memhandover::count_chunks(client.view()).by_client.at(client.slot()),
      .awake_ns = monotonic_ns(),
      .stands =
          [this, &demanded, before = demanded.load()] {
            return parking_->has_order() && demanded.load() == before;
          },
      .give = [&client](std::span<std::uint32_t const> chunks) { client.release(chunks); },
      .from_operator = true};
  auto const given = give_up(wanted);
  client.release(given.chunks);
  given.afterwards(given.chunks);
}

/// Whatever fails on the way, what has been taken until then is the server's.
memhandover::demand_answer demand_answers::give_up(memhandover::demand const& wanted) {
  memhandover::demand_answer answer;
  std::unique_lock lock{mutex_};
  answer.closed_ns = answer.idle_ns = monotonic_ns();
  if (spaces_ == nullptr) {
    return answer;  // still being set up: there is nothing to give
  }
  answer.afterwards = [this](std::span<std::uint32_t const> given) { finish_answer(given); };
  try {
    take_for(wanted, lock, answer);
  } catch (std::exception const& why) {
    spdlog::error("a demand could not be met in full reason=\"{}\"", why.what());
  }
  if (spaces_ != nullptr) {
    spaces_->publish();
  }
  return answer;
}

void demand_answers::take_for(memhandover::demand const& wanted, lock_type& lock,
                              memhandover::demand_answer& answer) {
  spaces_->stock().collect();  // a thread may not have come back for it yet
  // What a commit may still need is not taken while that would not do.
  auto const unused_ones = [this] {
    return gate_ == nullptr ? spaces_->idle() : spaces_->stock().size();
  };
  bool const may_revoke = unused_ones() >= wanted.chunks || await_commit_end(lock, wanted);
  if (spaces_ == nullptr) {
    return;  // it has all been given up meanwhile
  }
  ++count_;
  spaces_->stock().collect();
  answer.closed_ns = answer.idle_ns = monotonic_ns();
  if (gate_ == nullptr) {
    spaces_->take_idle(wanted.chunks, answer.chunks);
  } else if (spaces_->stock().size() >= wanted.chunks) {
    spaces_->give_stock(wanted.chunks, answer.chunks);
  }
  if (may_revoke && still_missing(wanted.chunks, answer.chunks) > 0 &&
      !spaces_->revocable().empty()) {
    try {
      revoke_behind_gate(wanted, lock, answer);
    } catch (std::exception const& why) {
      // What has been taken already is the server's; the arena is as it was.
      spdlog::error("the arena could not be taken away reason=\"{}\"", why.what());
    }
  }
  if (spaces_ == nullptr) {
    return;
  }
  if (answer.chunks.empty()) {
    spaces_->give_stock(wanted.chunks, answer.chunks);  // less than was asked for, but all there is
  }
  if (!may_revoke) {
    return;
  }
  if (gate_ != nullptr) {
    // What the optimizer gives back and asks for again goes only where all the rest is too little.
    auto const missing = still_missing(wanted.chunks, answer.chunks);
    answer.chunks.reserve(answer.chunks.size() + missing);
    auto const rest = spaces_->persistent().shrink(missing);
    answer.chunks.insert(answer.chunks.end(), rest.begin(), rest.end());
  }
  park_rest(wanted, lock, answer);
}

void demand_answers::park_rest(memhandover::demand const& wanted, lock_type& lock,
                               memhandover::demand_answer const& answer) {
  auto const missing = still_missing(wanted.chunks, answer.chunks);
  if (parking_ == nullptr || !wanted.may_park || (missing == 0 && !wanted.from_operator)) {
    return;
  }
  unlocked const meanwhile{lock};
  parking_->take(wanted, missing, answer.chunks);
}

/// Unless it is closed for what is parked.
void demand_answers::open(launch_gate& gate) const {
  if (parking_ == nullptr || parking_->is_resident()) {
    gate.open();
  }
}

/// When the server need not wait for it.
void demand_answers::finish_answer(std::span<std::uint32_t const> given) noexcept {
  if (!given.empty()) {
    std::lock_guard const lock{mutex_};
    history_->record(memhandover::chunk_event::given, given);
  }
  if (gate_ == nullptr) {
    memory_->sweep();
  } else {
    finish_revocation();
  }
}

/// On CUDA: removes the mappings of what has been revoked, and opens the gate.
void demand_answers::finish_revocation() noexcept {
  {
    std::lock_guard const lock{mutex_};
    // Who ends waits for what is left to be unmapped.
    if (spaces_ == nullptr || !spaces_->finish_unmapping()) {
      return;
    }
    if (spaces_->arena().revoked() && cycle_.is_running()) {
      cycle_
          .abort();  // if the micro-batch has been discarded already there is nothing left to abort
    }
    open(*gate_);
    if (unmaps_used_) {
      cycle_.note_reopened();
    }
    spaces_->drop_retired();
    spaces_->publish();
  }
  unmapped_.notify_all();
}

/// A commit is short, and what it adds up must not be lost. A compute pause holds nobody meanwhile. False: it waits
/// for memory that the server would have to give, or the server waits no longer.
bool demand_answers::await_commit_end(lock_type& lock, memhandover::demand const& wanted) {
  if (!cycle_.is_committing()) {
    return true;
  }
  auto const hurry = [this](bool on) {
    urgent_.store(on, std::memory_order_release);
    if (gate_ != nullptr) {
      gate_->set_urgent(on);
    }
  };
  hurry(true);
  auto const ended = [this] { return !cycle_.is_committing(); };
  auto const over = [&] { return ended() || cycle_.is_held_up(); };
  while (!cycle_.wait_for(lock, look_every, over) && wanted.stands()) {
  }
  hurry(false);
  return ended();
}

/// Which of the revocable chunks go if all are taken and the server needs `count`. On CUDA those
/// without a mapping are taken into account as well, so that neighbours are found among all of them.
demand_answers::division demand_answers::divide(std::uint32_t count,
                                                std::vector<std::uint32_t> const& given) const {
  division result;
  std::vector<std::uint32_t> all;
  for (auto const* const victim : spaces_->revocable()) {
    all.insert(all.end(), victim->chunks().begin(), victim->chunks().end());
  }
  result.revocable = all.size();
  result.stock = spaces_->stock().size();
  result.generation = spaces_->generation();
  if (gate_ != nullptr) {
    all.insert(all.end(), spaces_->stock().chunks().begin(), spaces_->stock().chunks().end());
  }
  auto const chosen = spaces_->choose(count, all, given);
  std::set_difference(all.begin(), all.end(), chosen.begin(), chosen.end(),
                      std::back_inserter(result.kept));
  result.given = given;
  result.given.insert(result.given.end(), chosen.begin(), chosen.end());
  if (cycle_.is_running()) {
    std::vector<bool> live(memory_->shape().chunk_count);
    for (auto const chunk : spaces_->arena().chunks()) {
      live.at(chunk) = true;
    }
    result.live = static_cast<std::uint32_t>(
        std::count_if(result.given.begin(), result.given.end(),
                      [&live](std::uint32_t chunk) { return live.at(chunk); }));
  }
  return result;
}

/// Takes what is revocable, and tells whether the gate may be opened. On CUDA the mappings are removed, and the gate
/// opened, afterwards.
bool demand_answers::revoke(division parts, memhandover::demand_answer& answer) {
  bool const on_host = gate_ == nullptr;
  for (auto* const victim : spaces_->revocable()) {
    victim->revoke(on_host);  // on the host there is one at most
  }
  // Nothing throws from here on: the memory has changed hands.
  bool const in_use = spaces_->arena().revoked() && cycle_.revoke(answer.idle_ns);
  answer.chunks = std::move(parts.given);
  answer.live_chunks = parts.live;
  if (on_host) {
    spaces_->stock().add(parts.kept);
    if (in_use) {
      cycle_.run_again();  // before anybody is granted more
    }
    return true;
  }
  spaces_->keep_until_unmapped(std::move(parts.kept));
  unmaps_used_ = in_use;
  return false;
}

/// Closes the gate, waits until nothing runs, and takes what is revocable.
void demand_answers::revoke_behind_gate(memhandover::demand const& wanted, lock_type& lock,
                                        memhandover::demand_answer& answer) {
  auto const count = still_missing(wanted.chunks, answer.chunks);
  auto* const gate = &computing_;
  auto const deadline =
      monotonic_ns() + (gate_ != nullptr ? kernel_patience_ns : operator_patience_ns);
  bool closed = false;
  auto const open_it = [this, &closed](launch_gate* of) {
    if (std::exchange(closed, false)) {
      open(*of);
    }
  };
  // Whatever fails, nobody stays held.
  std::unique_ptr<launch_gate, decltype(open_it)> const at_end{gate, open_it};
  division parts;
  for (;;) {
    bool idle = false;
    {
      unlocked const meanwhile{lock};  // a thread inside a launch may need this lock to get out
      closed = gate->close(deadline);
      answer.closed_ns = monotonic_ns();
    }
    if (closed && spaces_ != nullptr) {
      parts = divide(count, answer.chunks);  // while the device still runs
      unlocked const meanwhile{lock};
      idle = gate->wait_idle(deadline);
    }
    answer.idle_ns = monotonic_ns();
    answer.unit_ended_ns = idle ? gate->unit_ended_ns() : 0;
    if (!idle || spaces_ == nullptr) {
      return;
    }
    if (!cycle_.is_committing()) {
      break;
    }
    open_it(gate);
    if (!await_commit_end(lock, wanted) || spaces_ == nullptr) {  // it began in between
      return;
    }
  }
  auto const victims = spaces_->revocable();
  if (victims.empty()) {
    return;
  }
  // Memory is allocated and freed beside a closed gate as well.
  auto const chunks = std::accumulate(
      victims.begin(), victims.end(), std::size_t{0},
      [](std::size_t sum, training_spaces::space* of) { return sum + of->chunks().size(); });
  bool const as_it_was = parts.revocable == chunks && parts.stock == spaces_->stock().size() &&
                         parts.generation == spaces_->generation();
  bool const opens = revoke(as_it_was ? std::move(parts) : divide(count, answer.chunks), answer);
  if (opens) {
    open_it(gate);
    if (spaces_->arena().revoked() && cycle_.is_running()) {
      cycle_.note_reopened();
    }
  }
  closed = false;
}

}  // namespace sluice::step
