/// Sends, receives, and groups that are not of one communicator's collectives alone: they wait until those that take part
/// in them have come to theirs.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "nccl_shim/question.hpp"

namespace sluice::nccl_shim {
namespace {

/// What one communicator has of them.
struct part {
  std::shared_ptr<known_communicator> of;
  std::vector<transfer> transfers;

  [[nodiscard]] exchanges& counts() const { return of->ranks->transfers(); }
  /// A collective is like a send to, and a receive from, all other ranks.
  void add(collective const& call) {
    if (!is_of_all(call.what)) {
      transfers.push_back({static_cast<unsigned>(call.root), call.what == operation::send});
      return;
    }
    for (unsigned const peer : counts().others()) {
      transfers.push_back({peer, true});
      transfers.push_back({peer, false});
    }
  }
};

std::vector<part> parts_of(std::span<collective const> calls,
                           std::span<std::shared_ptr<known_communicator> const> of) {
  std::vector<part> parts;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    auto const same = [&](part const& each) { return each.of == of[i]; };
    auto found = std::find_if(parts.begin(), parts.end(), same);
    if (found == parts.end()) {
      found = parts.insert(found, part{of[i], {}});
    }
    found->add(calls[i]);
  }
  return parts;
}

/// A send, a receive, or a group.
class pending_exchange final : public question {
 public:
  pending_exchange(std::span<collective const> calls,
                   std::span<std::shared_ptr<known_communicator> const> of, int& direct)
      : calls_{calls.begin(), calls.end()}, parts_{parts_of(calls, of)}, result_{direct} {}

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
    if (shown_ && the_board()->let_go()) {
      return agreed;
    }
    if (waiting_.looks_around() && owes_others()) {
      return agreed;  // others launched it without asking; what comes before it must not wait for them
    }
    if (waiting_.looks()) {
      look_for_deaths();
    }
    if (waiting_.tells()) {
      std::fprintf(stderr, "sluice: %s waits for ranks %s\n", name_of(calls_.front().what),
                   list(lacks().ranks).c_str());
    }
    return not_yet;
  }

  /// Whether nobody needs to be asked: says first that it is about to go on.
  [[nodiscard]] bool passes() {
    if (is_needed()) {
      return false;
    }
    for (part const& each : parts_) {
      each.counts().begin_passing();
    }
    passing_ = !is_needed();
    if (!passing_) {
      end_passing();
    }
    return passing_;
  }

  [[nodiscard]] bool is_needed() const {
    return std::any_of(parts_.begin(), parts_.end(),
                       [](part const& each) { return each.of->ranks->agreement().is_needed(); });
  }

  void end_passing() const {
    for (part const& each : parts_) {
      each.counts().end_passing();
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
    for (part const& each : parts_) {
      now.emplace_back(*each.of);
    }
    tell_made();
    known_communicator* const failed = trouble();
    int result = failed != nullptr ? failed->trouble() : int{success};
    if (failed == nullptr) {
      inside_nccl const here;
      result = perform(calls_);
    }
    result_.is(result, failed != nullptr ? *failed : *parts_.front().of);
  }

  /// Before NCCL is called, which may wait for the other ranks there, to connect: they must not be waiting for this one.
  /// Nothing can keep it from being made any more.
  void tell_made() {
    for (part const& each : parts_) {
      each.counts().made(each.transfers);
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
    auto const found = std::find_if(parts_.begin(), parts_.end(),
                                    [](part const& each) { return each.of->trouble() != success; });
    return found != parts_.end() ? found->of.get() : nullptr;
  }

  [[nodiscard]] lacking lacks() const {
    lacking all;
    for (part const& each : parts_) {
      lacking const more = each.counts().lacks(each.transfers);
      all.ranks.insert(all.ranks.end(), more.ranks.begin(), more.ranks.end());
      all.places |= more.places;
      all.all_have_one = all.all_have_one && more.all_have_one;
    }
    return all;
  }

  void look_for_deaths() {
    for (part const& each : parts_) {
      each.of->ranks->look_for_deaths();
      auto const lost = each.of->ranks->loss();
      if (!lost.empty() && each.of->fail(remote_error)) {
        std::fprintf(stderr, "sluice: %s; %s will not be made\n", lost.c_str(),
                     name_of(calls_.front().what));
      }
    }
  }

  std::vector<collective> calls_;
  std::vector<part> parts_;
  call_result result_;
  bool asked_ = false;
  bool passing_ = false;
  bool shown_ = false;  // on the board
  waiting_time waiting_;
};

}  // namespace

int hand_over_exchange(std::span<collective const> calls,
                       std::span<std::shared_ptr<known_communicator> const> of) {
  int result = success;
  auto call = std::make_unique<pending_exchange>(calls, of, result);
  sluice_agreed_call const handed = call.release()->as_call(calls.front().where);
  return gate()->make_agreed(&handed) == SLUICE_AGREED_MADE ? result : int{success};
}

}  // namespace sluice::nccl_shim
