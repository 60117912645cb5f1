/// Sends, receives, groups that are not of one communicator's collectives alone, and graphs that hold such: they wait until
/// those that take part in them have come to theirs.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nccl_shim/calls/communicators.hpp"
#include "nccl_shim/calls/exchange_part.hpp"
#include "nccl_shim/calls/pending_calls.hpp"
#include "nccl_shim/calls/question.hpp"
#include "nccl_shim/calls/surroundings.hpp"

namespace sluice::nccl_shim {
namespace {

/// What stands for an exchange: the ranks at its other ends are asked.
class exchange_question : public question {
 public:
  explicit exchange_question(std::vector<exchange_part> parts) : parts_{std::move(parts)} {}

 protected:
  /// No communicator has trouble.
  virtual void perform() = 0;
  /// One has, and nothing is to be made.
  virtual void give_up(known_communicator& troubled) = 0;
  /// For whoever reads of it.
  [[nodiscard]] virtual std::string text() const = 0;

  [[nodiscard]] known_communicator& first() const noexcept { return *parts_.front().of; }

 private:
  void ask() override {
    if (!std::exchange(asked_, true)) {
      waiting_.begin();
    }
  }

  [[nodiscard]] answer is_agreed() override {
    if (trouble() != nullptr || passes() || is_flushing()) {
      return agreed;
    }
    if (lacks().ranks.empty()) {
      return agreed;  // all others have made theirs
    }
    shown_ = the_board()->wait(this, board::reason::exchange, [this] {
      return lacks().known_places();
    }) || shown_;
    if (shown_ && the_board()->release()) {
      return agreed;
    }
    if (waiting_.looks_around() && lags_behind_others()) {
      return agreed;  // others launched it without asking; what comes before it must not wait for them
    }
    if (waiting_.looks()) {
      look_for_deaths();
    }
    if (waiting_.reports()) {
      std::fprintf(stderr, "sluice: %s waits for ranks %s\n", text().c_str(),
                   list(lacks().ranks).c_str());
    }
    return not_yet;
  }

  /// Whether nobody needs to be asked: says first that it is about to go on.
  [[nodiscard]] bool passes() {
    if (is_needed()) {
      return false;
    }
    for (exchange_part const& each : parts_) {
      counts(each).begin_passing();
    }
    passing_ = !is_needed();
    if (!passing_) {
      end_passing();
    }
    return passing_;
  }

  [[nodiscard]] bool is_needed() const {
    return std::any_of(parts_.begin(), parts_.end(), [](exchange_part const& each) {
      return each.of->ranks->agreement().is_needed();
    });
  }

  void end_passing() const {
    for (exchange_part const& each : parts_) {
      counts(each).end_passing();
    }
  }

  [[nodiscard]] bool withdraw() override {
    if (std::exchange(shown_, false) && the_board()->take_back(this)) {
      shown_ = true;
      return true;
    }
    return lacks().ranks.empty();  // the others wait for this one
  }

  void make() override {
    std::vector<calling> now;
    now.reserve(parts_.size());
    for (exchange_part const& each : parts_) {
      now.emplace_back(*each.of);
    }
    report_made();
    if (known_communicator* const troubled = trouble(); troubled != nullptr) {
      give_up(*troubled);
    } else {
      perform();
    }
  }

  /// Before NCCL is called, which may wait for the other ranks there, to connect: they must not be waiting for this one.
  /// Nothing can keep it from being made any more.
  void report_made() {
    for (exchange_part const& each : parts_) {
      counts(each).made(each.with);
    }
    the_board()->progressed();
    if (passing_) {
      end_passing();
    }
    if (shown_) {
      the_board()->made(this);
    }
  }

  void drop() override {}  // it has been withdrawn, and others go on waiting

  /// A communicator that makes no more calls.
  [[nodiscard]] known_communicator* trouble() const noexcept {
    auto const found = std::find_if(parts_.begin(), parts_.end(), [](exchange_part const& each) {
      return each.of->trouble() != success;
    });
    return found != parts_.end() ? found->of.get() : nullptr;
  }

  [[nodiscard]] lacking lacks() const {
    lacking all;
    for (exchange_part const& each : parts_) {
      lacking const more = counts(each).lacks(each.with);
      all.ranks.insert(all.ranks.end(), more.ranks.begin(), more.ranks.end());
      all.places |= more.places;
      all.all_have_one = all.all_have_one && more.all_have_one;
    }
    return all;
  }

  void look_for_deaths() {
    for (exchange_part const& each : parts_) {
      each.of->ranks->look_for_deaths();
      auto const lost = each.of->ranks->loss();
      if (!lost.empty() && each.of->fail(remote_error)) {
        std::fprintf(stderr, "sluice: %s; %s will not be made\n", lost.c_str(), text().c_str());
      }
    }
  }

  [[nodiscard]] static exchanges& counts(exchange_part const& of) {
    return of.of->ranks->transfers();
  }

  std::vector<exchange_part> parts_;
  bool asked_ = false;
  bool passing_ = false;
  bool shown_ = false;  // on the board
  waiting_time waiting_;
};

/// A send, a receive, or a group.
class pending_exchange final : public exchange_question {
 public:
  pending_exchange(std::span<collective const> calls, std::vector<exchange_part> parts, int& direct)
      : exchange_question{std::move(parts)}, calls_{calls.begin(), calls.end()}, result_{direct} {}

 private:
  void perform() override {
    inside_nccl const here;
    result_.is(nccl_shim::perform(calls_), first());
  }
  void give_up(known_communicator& troubled) override { result_.is(troubled.trouble(), troubled); }
  [[nodiscard]] std::string text() const override { return name_of(calls_.front().what); }

  std::vector<collective> calls_;
  call_result result_;
};

/// The launch of a graph.
class pending_graph_exchange final : public exchange_question {
 public:
  pending_graph_exchange(numbered_call const& what, std::vector<exchange_part> parts,
                         sluice_graph_launch const& launch)
      : exchange_question{std::move(parts)}, what_{what}, launch_{launch} {}

 private:
  void perform() override { launch_.make(first()); }
  void give_up(known_communicator& /*troubled*/) override {}  // the launch was refused
  [[nodiscard]] std::string text() const override { return to_text(what_); }

  numbered_call what_;
  graph_launch launch_;
};

}  // namespace

int make(std::span<collective const> calls, exchange_group one) {
  int result = success;
  return hand_over(std::make_unique<pending_exchange>(calls, std::move(one.parts), result),
                   calls.front().where, result, success);
}

sluice_agreed_call as_agreed(numbered_call const& graph, exchange_group one,
                             sluice_graph_launch const& launch) {
  auto call = std::make_unique<pending_graph_exchange>(graph, std::move(one.parts), launch);
  return call.release()->as_call(static_cast<stream>(launch.stream));
}

}  // namespace sluice::nccl_shim
