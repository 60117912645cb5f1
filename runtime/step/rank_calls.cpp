/// The C boundary, host: what the ranks of a job ask each other.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/base/environment.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/host_operators.hpp"
#include "runtime/step/process_state.hpp"

namespace sluice::step {
namespace {

using memhandover::monotonic_ns;
using nccl_shim::outcome;
using namespace std::chrono_literals;

/// A compute pause may begin at any time.
constexpr std::chrono::nanoseconds between_looks = 1ms;

nccl_shim::numbered_call numbered(sluice_collective const& what) {
  return {what.operation, what.type, what.count, what.root};
}

sluice_collective collective(nccl_shim::numbered_call const& what) {
  return {what.operation, what.type, what.count, what.root};
}

rank_agreement* agreement() noexcept {
  auto* const state = sharing();
  return state != nullptr ? state->ranks.load() : nullptr;
}

/// Who has joined and does not know its rank yet; of the thread that trains.
std::unique_ptr<rank_agreement>& joined() {
  static std::unique_ptr<rank_agreement> one;
  return one;
}

bool is_sound(process_state const& state) {
  return state.memory->state() == arena_state::sound;
}

int granted(process_state& state) {
  state.memory->operators().operator_pass();
  make_granted(state, true);
  return SLUICE_GRANTED;
}

int ended(process_state& state, int answer) {
  come_back_to_operator(state);
  return answer;
}

}  // namespace
}  // namespace sluice::step

using namespace sluice::step;

extern "C" {

int sluice_ranks_join(char const* const* keys, unsigned groups) {
  auto* const state = sharing();
  if (state == nullptr) {
    return SLUICE_FAILED;
  }
  return guarded([=] {
    std::vector<std::string> const names{keys, keys + groups};
    joined() = rank_agreement::join(sluice::environment("SLUICE_RUNTIME_DIR"), names);
    if (joined() == nullptr) {
      throw sluice::error{sluice::error_kind::unsupported,
                          "the ranks of this job cannot meet in the folder of the pool"};
    }
  });
}

int sluice_ranks_complete(struct sluice_place const* in_each) {
  auto* const state = sharing();
  if (state == nullptr || joined() == nullptr) {
    return SLUICE_FAILED;
  }
  return guarded([=] {
    std::vector<rank_agreement::place> places;
    places.reserve(joined()->groups());
    for (std::size_t group = 0; group < joined()->groups(); ++group) {
      places.push_back({in_each[group].rank, in_each[group].ranks});
    }
    if (!joined()->complete(places)) {
      joined().reset();
      throw sluice::error{sluice::error_kind::unsupported,
                          "other ranks of this job have not joined, or are too many"};
    }
    // The control thread may use those that were there before until the end.
    auto* const ours = joined().release();
    state->ranks.store(ours);
    state->memory->operators().agree_with(*ours);
  });
}

int sluice_agree(unsigned group, struct sluice_collective const* what, int inside,
                 uint32_t timeout_ms) {
  auto* const state = sharing();
  auto* const ranks = agreement();
  if (ranks == nullptr) {
    return SLUICE_GRANTED;
  }
  auto const deadline =
      monotonic_ns() + std::chrono::nanoseconds{std::chrono::milliseconds{timeout_ms}}.count();
  if (!ranks->is_open()) {
    ranks->follow(inside != 0 ? state->memory->micro_batch() : 0);
    if (inside != 0 && !is_sound(*state)) {
      return SLUICE_DROPPED;
    }
    leave_operator(*state);
    ranks->ask(numbered(*what), group);
  }
  for (;;) {
    state->memory->want_parked();  // while this rank is away none is granted anything
    // What has lost its memory is dropped, paused or not.
    ranks->hold(is_held(*state) && (inside == 0 || is_sound(*state)));
    switch (ranks->await(std::min(deadline, monotonic_ns() + between_looks.count()))) {
      case outcome::granted:
        return granted(*state);
      case outcome::dropped:
        if (inside != 0) {
          state->memory->drop_micro_batch([] { return true; });  // this thread runs it
          return ended(*state, SLUICE_DROPPED);
        }
        ranks->ask(numbered(*what), group);  // it comes before the micro-batch that was dropped
        break;
      case outcome::lost:
        return ended(*state, SLUICE_LOST);
      case outcome::differs:
        return ended(*state, SLUICE_DIFFERS);
      case outcome::late:
        if (monotonic_ns() >= deadline) {
          return SLUICE_LATER;
        }
        break;
    }
  }
}

void sluice_agree_made(void) {
  auto* const state = sharing();
  if (auto* const ranks = agreement()) {
    make_granted(*state, false);
    state->memory->operators().operator_end();
    ranks->made();
    come_back_to_operator(*state);
  }
}

int sluice_agree_withdraw(void) {
  auto* const state = sharing();
  auto* const ranks = agreement();
  if (ranks == nullptr || !ranks->is_open()) {
    return ranks != nullptr && state->makes_granted.load() ? SLUICE_GRANTED : SLUICE_DROPPED;
  }
  return ranks->withdraw() ? granted(*state) : ended(*state, SLUICE_DROPPED);
}

uint64_t sluice_ranks_number(void) {
  auto* const ranks = agreement();
  return ranks != nullptr ? ranks->number() : 0;
}

unsigned sluice_ranks_missing(unsigned* ranks, unsigned most) {
  auto* const all = agreement();
  if (all == nullptr) {
    return 0;
  }
  auto const missing = all->missing();
  std::copy_n(missing.begin(), std::min<std::size_t>(missing.size(), most), ranks);
  return static_cast<unsigned>(missing.size());
}

char const* sluice_ranks_loss(void) {
  static thread_local std::string text;
  auto* const ranks = agreement();
  text = ranks != nullptr ? ranks->loss() : "";
  return text.c_str();
}

int sluice_ranks_difference(uint64_t* number, unsigned ranks[2],
                            struct sluice_collective calls[2]) {
  auto* const all = agreement();
  auto const found = all != nullptr ? all->difference() : std::nullopt;
  if (!found) {
    return 0;
  }
  *number = found->number;
  for (unsigned each = 0; each < 2; ++each) {
    ranks[each] = found->ranks.at(each);
    calls[each] = collective(found->calls.at(each));
  }
  return 1;
}
}
