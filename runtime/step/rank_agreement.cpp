#include "runtime/step/rank_agreement.hpp"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::step {
namespace {

using memhandover::monotonic_ns;
using nccl_shim::outcome;
using namespace std::chrono_literals;

constexpr std::chrono::nanoseconds between_looks = 20ms;
/// Nobody who waits in a group is woken by what becomes of the group of all.
constexpr std::chrono::nanoseconds between_looks_at_all = 1ms;

}  // namespace

rank_agreement::rank_agreement(std::vector<group> groups) noexcept : groups_{std::move(groups)} {}

std::unique_ptr<rank_agreement> rank_agreement::join(std::string const& folder,
                                                     std::span<std::string const> keys) {
  std::vector<group> groups;
  for (auto const& key : keys) {
    groups.push_back({nccl_shim::rank_group::join(folder, key)});
    if (groups.back().ranks == nullptr) {
      return nullptr;
    }
  }
  return std::unique_ptr<rank_agreement>{new rank_agreement{std::move(groups)}};
}

bool rank_agreement::complete(std::span<place const> in_each) {
  for (std::size_t at = 0; at < groups_.size(); ++at) {
    if (!groups_[at].ranks->complete(in_each[at].rank, in_each[at].ranks)) {
      return false;
    }
  }
  for (auto const& each : groups_) {
    each.ranks->need(true);
  }
  return true;
}

void rank_agreement::follow(std::uint64_t micro_batch) noexcept {
  inside_ = micro_batch != 0;
  if (inside_ && std::exchange(micro_batch_, micro_batch) != micro_batch) {
    epoch_ = all().epoch();
  }
}

void rank_agreement::ask(nccl_shim::numbered_call const& what, std::size_t of) noexcept {
  open_ = true;
  group_ = of;
  if (inside_ && !is_of_all()) {
    agreed().catch_up_with(all());
  }
  agreed().follow(inside_ ? epoch_ : agreed().epoch());
  agreed().arrive(what);
}

void rank_agreement::hold(bool held) noexcept {
  if (held == held_) {
    return;
  }
  // If the pause finds it granted already, it has to be made all the same.
  held_ = held && agreed().pause(false) < agreed().number();
  if (!held_) {
    agreed().resume();
  }
}

outcome rank_agreement::await(std::int64_t deadline_ns) noexcept {
  for (;;) {
    std::int64_t const look_at = look_at_;
    auto const became = look(std::min(deadline_ns, look_at));
    std::int64_t const now = monotonic_ns();
    if (became != outcome::late) {
      hold(false);
      open_ = false;
      return became;
    }
    if (now >= look_at) {
      groups_.front().ranks->look_for_deaths();
      groups_[group_].ranks->look_for_deaths();
      look_at_ = now + between_looks.count();
    } else if (now >= deadline_ns) {
      return became;
    }
  }
}

outcome rank_agreement::look(std::int64_t deadline_ns) noexcept {
  if (is_of_all()) {
    return agreed().await(deadline_ns);
  }
  for (;;) {
    if (inside_ && all().epoch() != epoch_) {
      agreed().catch_up_with(all());
    }
    std::int64_t const now = monotonic_ns();
    auto const became = agreed().await(std::min(deadline_ns, now + between_looks_at_all.count()));
    if (became != outcome::late) {
      return became;
    }
    if (all().lost()) {  // who is waited for may wait for that one
      return outcome::lost;
    }
    if (now >= deadline_ns) {
      return became;
    }
  }
}

bool rank_agreement::withdraw() noexcept {
  hold(false);
  open_ = false;
  if (agreed().pause(false) >= agreed().number()) {
    agreed().resume();
    return true;
  }
  if (is_of_all()) {
    agreed().resume_without();
  } else {
    all().end_epoch(inside_ ? epoch_ : all().epoch());
    agreed().resume_without(all());
  }
  return false;
}

void rank_agreement::made() noexcept {
  agreed().launched();
}

std::string rank_agreement::loss() const {
  groups_.front().ranks->look_for_deaths();  // somebody may have found it in a group
  return groups_.front().ranks->loss();
}

void rank_agreement::pause() noexcept {
  for (auto& each : groups_) {
    each.cut = each.ranks->agreement().pause(false);
  }
}

bool rank_agreement::await_debts(std::int64_t deadline_ns) noexcept {
  // Where a rank is lost, what was granted fails when it is made.
  return std::ranges::all_of(groups_, [deadline_ns](auto const& each) {
    return each.ranks->agreement().await_debts(each.cut, deadline_ns) != outcome::late;
  });
}

void rank_agreement::run_again() noexcept {
  all().begin_epoch();
  // Before a pause ends that has taken the memory: what this rank waits for in a group must not be granted then.
  for (auto const& each : std::span{groups_}.subspan(1)) {
    each.ranks->agreement().catch_up_with(all());
  }
}

void rank_agreement::resume() noexcept {
  for (auto const& each : groups_) {
    each.ranks->agreement().resume();
  }
}

}  // namespace sluice::step
