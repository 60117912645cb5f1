#include "runtime/step/rank_agreement.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "memhandover/ledger.hpp"

namespace sluice::step {
namespace {

using memhandover::monotonic_ns;
using nccl_shim::outcome;
using namespace std::chrono_literals;

constexpr std::chrono::nanoseconds between_looks = 20ms;

}  // namespace

rank_agreement::rank_agreement(std::unique_ptr<nccl_shim::membership> ranks) noexcept
    : ranks_{std::move(ranks)} {}

std::unique_ptr<rank_agreement> rank_agreement::join(std::string const& folder,
                                                     std::string const& key) {
  auto joined = nccl_shim::membership::join(folder, key);
  return joined == nullptr ? nullptr
                           : std::unique_ptr<rank_agreement>{new rank_agreement{std::move(joined)}};
}

bool rank_agreement::complete(unsigned rank, unsigned ranks) {
  if (!ranks_->complete(rank, ranks)) {
    return false;
  }
  ranks_->need(true);
  return true;
}

void rank_agreement::follow(std::uint64_t micro_batch) noexcept {
  if (micro_batch == 0 || std::exchange(micro_batch_, micro_batch) != micro_batch) {
    agreed().follow(agreed().epoch());
  }
}

void rank_agreement::ask(nccl_shim::numbered_call const& what) noexcept {
  open_ = true;
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
    auto const became = agreed().await(std::min(deadline_ns, look_at));
    std::int64_t const now = monotonic_ns();
    if (became != outcome::late) {
      hold(false);
      open_ = false;
      return became;
    }
    if (now >= look_at) {
      ranks_->look_for_deaths();
      look_at_ = now + between_looks.count();
    } else if (now >= deadline_ns) {
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
  agreed().resume_without();
  return false;
}

void rank_agreement::made() noexcept {
  agreed().launched();
}

void rank_agreement::pause() noexcept {
  cut_ = agreed().pause(false);
}

bool rank_agreement::await_debts(std::int64_t deadline_ns) noexcept {
  // Where a rank is lost, what was granted fails when it is made.
  return agreed().await_debts(cut_, deadline_ns) != outcome::late;
}

void rank_agreement::resume() noexcept {
  agreed().resume();
}

}  // namespace sluice::step
