#include "nccl_shim/calls/pending_calls.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "nccl_shim/agreement/clock.hpp"
#include "nccl_shim/calls/question.hpp"
#include "nccl_shim/calls/surroundings.hpp"

namespace sluice::nccl_shim {
namespace {

/// For those that wait for this process.
[[gnu::hot]] void notify_of_progress() noexcept {
  if (board* const at = the_board(); at != nullptr) {
    at->progressed();
  }
}

/// What stands for a number of the cut: all ranks of a communicator are asked.
class numbered_question : public question {
 public:
  numbered_question(numbered_call const& what, numbered_group one)
      : of_{std::move(one.of)}, what_{what}, inside_{std::move(one.place)} {}

  /// It has been arrived at already.
  void has_arrived() noexcept { asked_ = true; }

 protected:
  virtual void perform() = 0;

  [[nodiscard]] known_communicator& of() const noexcept { return *of_; }

 private:
  [[nodiscard]] cut& agreement() const { return of_->ranks->agreement(); }
  [[nodiscard]] cut& leading() const { return inside_->domain->ranks->agreement(); }
  /// Whether it is part of a micro-batch that ends with another communicator.
  [[nodiscard]] bool follows() const noexcept { return inside_ && inside_->domain != of_; }

  void ask() override {
    if (of_->trouble() != success) {
      return;  // it will not be made anyhow
    }
    if (std::exchange(asked_, true)) {
      agreement().resume();
      return;
    }
    if (follows()) {
      agreement().catch_up_with(leading());
    }
    // What this process runs again has had another epoch begin before, so that nothing of the attempt before
    // can be granted any more.
    agreement().follow(inside_ ? inside_->epoch : agreement().epoch());
    arrive();
  }

  void arrive() {
    agreement().arrive(what_);
    notify_of_progress();
  }

  [[nodiscard]] answer is_agreed() override {
    answer const became = asked_ && of_->trouble() == success ? look() : agreed;
    if (became != not_yet) {
      show_nothing();
    }
    return became;
  }

  [[nodiscard]] answer look() {
    if (asked_at_ != 0 && monotonic_ns() < ask_again_at_) {
      return not_yet;
    }
    if (follows() && leading().epoch() != inside_->epoch) {
      agreement().catch_up_with(leading());
    }
    switch (agreement().await(0)) {
      case outcome::granted:
        return agreed;
      case outcome::late:
        break;
      case outcome::dropped:
        if (inside_) {
          asked_ = false;
          return dropped;
        }
        arrive();  // it comes before the micro-batch that was dropped
        break;
      case outcome::lost:
        complain_of_death(*of_);
        return agreed;
      case outcome::differs:
        of_->fail_by_difference();
        return agreed;
    }
    std::int64_t const now = monotonic_ns();
    if (asked_at_ == 0) {
      asked_at_ = now;
      waiting_.begin();
    }
    ask_again_at_ = now + between_looks(std::chrono::nanoseconds{now - asked_at_}).count();
    if (waiting_.looks()) {
      look_for_deaths();
    }
    if (waiting_.reports()) {
      complain_of_delay();
    }
    if (waiting_.looks_around()) {
      show();
    }
    return not_yet;
  }

  [[nodiscard]] std::chrono::nanoseconds between_looks(std::chrono::nanoseconds waited) const {
    auto const own = agreement().between_looks(waited);
    return follows() ? std::max(own, leading().between_looks(waited)) : own;
  }

  /// Those that are waited for may wait for others of the micro-batch's ranks.
  void look_for_deaths() {
    of_->ranks->look_for_deaths();
    if (!follows()) {
      return;
    }
    inside_->domain->ranks->look_for_deaths();
    // What has been granted meanwhile is made: the others have launched it.
    if (leading().lost() && !agreement().is_granted()) {
      complain_of_death(*inside_->domain);
    }
  }

  /// For those that wait for what this process sends or receives behind it.
  void show() {
    board* const at = the_board();
    if (at == nullptr || !of_->ranks->all_have_places()) {
      return;
    }
    shown_ = at->wait(this, board::reason::collective, [this] {
      return of_->ranks->transfers().places_of(agreement().missing()).known_places();
    }) || shown_;
  }

  void show_nothing() {
    if (std::exchange(shown_, false)) {
      static_cast<void>(the_board()->take_back(this));
    }
  }

  [[nodiscard]] bool withdraw() override {
    if (!asked_) {
      return false;
    }
    show_nothing();
    bool const owed = agreement().pause(false) >= agreement().number();
    if (owed) {
      agreement().resume();
    }
    return owed;
  }

  void make() override {
    perform();
    if (asked_) {
      agreement().launched();
    }
  }

  void drop() override {
    if (!asked_) {
      return;
    }
    // It has been withdrawn.
    if (follows()) {
      leading().end_epoch(inside_->epoch);
      agreement().resume_without(leading());
    } else {
      agreement().resume_without();
    }
  }

  void complain_of_death(known_communicator const& among) {
    // Said first: whoever sees the error may end the process.
    std::fprintf(stderr, "sluice: %s; collective %llu, %s, will not be made\n",
                 among.ranks->loss().c_str(), static_cast<unsigned long long>(agreement().number()),
                 to_text(what_).c_str());
    of_->fail(remote_error);
  }

  void complain_of_delay() const {
    std::fprintf(stderr, "sluice: collective %llu, %s, waits for ranks %s\n",
                 static_cast<unsigned long long>(agreement().number()), to_text(what_).c_str(),
                 list(agreement().missing()).c_str());
  }

  std::shared_ptr<known_communicator> of_;
  numbered_call what_;
  std::optional<attempt> inside_;  // a micro-batch
  bool asked_ = false;
  bool shown_ = false;             // on the board
  std::int64_t asked_at_ = 0;      // first in vain
  std::int64_t ask_again_at_ = 0;  // not before
  waiting_time waiting_;
};

/// A call of NCCL's, or a group.
class pending_call final : public numbered_question {
 public:
  pending_call(std::span<collective const> calls, numbered_group one, int& direct)
      : numbered_question{numbered(calls), std::move(one)}, calls_{calls, direct} {}

 private:
  void perform() override { calls_.make(of()); }

  waiting_calls calls_;
};

/// The launch of a graph that holds some.
class pending_graph final : public numbered_question {
 public:
  pending_graph(numbered_call const& what, numbered_group one, sluice_graph_launch const& launch)
      : numbered_question{what, std::move(one)}, launch_{launch} {}

 private:
  void perform() override {
    calling const now{of()};
    if (now.trouble() == success) {
      launch_.make(of());
    }
  }

  graph_launch launch_;
};

/// The end of a micro-batch.
class pending_end final : public numbered_question {
 public:
  pending_end(attempt const& at, void (*keep)(void* of), void* keep_of, bool& kept)
      : numbered_question{numbered_end(), {at.domain, at}},
        keep_{keep},
        keep_of_{keep_of},
        kept_{kept} {}

 private:
  void perform() override {
    if (of().trouble() == success) {
      keep_(keep_of_);
      kept_ = true;
    }
  }

  void (*keep_)(void* of);
  void* keep_of_;
  bool& kept_;
};

/// Goes on with a call that was about to be made at once, inside the gate: the others have to be asked after all.
[[gnu::cold]] int ask_after_all(std::span<collective const> calls, at_once_group one,
                                passing became) {
  numbered_group asked{one.of->shared_from_this()};
  one.now.end();
  if (became == passing::refused) {
    gate()->leave();
    return make(calls, std::move(asked));
  }
  int result = success;
  auto call = std::make_unique<pending_call>(calls, std::move(asked), result);
  call->has_arrived();
  sluice_agreed_call const handed = call.release()->as_call(calls.front().where);
  bool const granted = handed.withdraw(handed.of) != 0;
  if (granted) {
    handed.make(handed.of);
  }
  gate()->leave();
  return granted || gate()->make_agreed(&handed) == SLUICE_AGREED_MADE ? result : int{success};
}

}  // namespace

[[gnu::hot]] int make(std::span<collective const> calls, at_once_group one) {
  one.agreement->prepare_to_pass();  // not before: until now it may have been the submitter's
  int result = success;
  auto became = passing::refused;
  {
    calling const now{*one.of};
    became = one.agreement->pass(numbered(calls));
    if (became != passing::refused) {
      notify_of_progress();
    }
    if (became == passing::passed) {
      result = make_calls(calls, now);
      one.agreement->launched();
    }
  }
  if (became == passing::passed) {
    gate()->leave();
    return result;
  }
  return ask_after_all(calls, std::move(one), became);
}

int make(std::span<collective const> calls, numbered_group one) {
  int result = success;
  return hand_over(std::make_unique<pending_call>(calls, std::move(one), result),
                   calls.front().where, result, success);
}

sluice_agreed_call as_agreed(numbered_call const& graph, numbered_group one,
                             sluice_graph_launch const& launch) {
  auto call = std::make_unique<pending_graph>(graph, std::move(one), launch);
  return call.release()->as_call(static_cast<stream>(launch.stream));
}

bool hand_over_end(attempt const& at, void (*keep)(void* of), void* keep_of) {
  bool kept = false;
  auto end = std::make_unique<pending_end>(at, keep, keep_of, kept);
  sluice_agreed_call const handed = end.release()->as_call(nullptr);
  static_cast<void>(gate()->make_agreed_now(&handed));
  return kept;
}

}  // namespace sluice::nccl_shim
