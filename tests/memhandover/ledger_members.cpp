#include "ledger_members.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>

#include "memhandover/ledger/client_mailbox.hpp"
#include "memhandover/ledger/ledger_writer.hpp"
#include "random_runs.hpp"

namespace sluice::memhandover::trials {
namespace {

using indices = std::vector<std::uint32_t>;

void check(bool condition, std::string const& fact) {
  if (!condition) {
    throw std::runtime_error{fact};
  }
}

void ring(int bell) {
  (void)::eventfd_write(bell, 1);
}

/// Waits until somebody rings, and not longer than a round of the others takes.
void await(int bell) {
  pollfd polled{bell, POLLIN, 0};
  if (::poll(&polled, 1, 1) == 1) {
    eventfd_t count = 0;
    (void)::eventfd_read(bell, &count);
  }
}

bool goes_on(members_place const& place) {
  return place.record.now.load() != phase::end && place.record.failed.load() == 0;
}

void count_operation(members_place const& place) {
  if (place.record.operations.fetch_add(1, std::memory_order_relaxed) % 64 == 0) {
    ring(place.progress);
  }
}

void put_mark(members_place const& place, std::uint32_t chunk, std::uint32_t slot) {
  auto& mark = place.record.mark[chunk];
  check(mark == 0, "chunk " + std::to_string(chunk) + " went to slot " + std::to_string(slot) +
                       " while slot " + std::to_string(mark - 1) + " had it");
  mark = slot + 1;
}

void remove_mark(members_place const& place, std::uint32_t chunk, std::uint32_t slot) {
  auto& mark = place.record.mark[chunk];
  check(mark == slot + 1, "chunk " + std::to_string(chunk) + " of slot " + std::to_string(slot) +
                              " became another's unasked");
  mark = 0;
}

class client_member {
 public:
  client_member(members_place const& place, std::uint32_t slot, std::uint64_t seed)
      : place_(place),
        slot_(slot),
        random_(seed),
        mailbox_(place.view, slot),
        demand_(demanded().seq) {}

  void live() {
    while (goes_on(place_)) {
      if (place_.record.now.load() == phase::run) {
        step();
        count_operation(place_);
      } else {
        park();
      }
    }
  }

 private:
  [[nodiscard]] numbered demanded() const {
    return numbered::unpack(place_.view.controls()[slot_].demand.load(std::memory_order_acquire));
  }

  void step() {
    if (mailbox_.resolve()) {
      ring(place_.doorbell);
    }
    if (auto const asked = demanded(); asked.seq != demand_) {
      demand_ = asked.seq;
      give(std::min<std::size_t>(asked.chunks, mine_.size()));
      place_.view.mailbox(slot_).demand_done.store(demand_, std::memory_order_release);
      ring(place_.doorbell);
    } else if (random_() % 2 == 0) {
      acquire();
    } else {
      give(below(random_, mine_.size() + 1));
    }
  }

  void acquire() {
    auto const count = 1 + below(random_, 6);
    mailbox_.ask(count, random_() % 2 == 0 ? lifetime::revocable : lifetime::lasting);
    ring(place_.doorbell);
    bool const patient = random_() % 4 != 0;
    while (patient && !mailbox_.answered() && place_.record.now.load() == phase::run &&
           goes_on(place_)) {
      await(place_.bells.at(slot_));
    }
    if (!mailbox_.answered()) {
      mailbox_.withdraw();
    }
    indices dirty;
    auto const got = mailbox_.collect(count, &dirty);
    check(got.size() <= count, "a client got more than it asked for");
    for (auto const chunk : got) {
      put_mark(place_, chunk, slot_);
      bool const told = std::find(dirty.begin(), dirty.end(), chunk) != dirty.end();
      check(told || place_.record.used[chunk].load() == 0,
            "old contents of chunk " + std::to_string(chunk) + " were not told");
      place_.record.used[chunk].store(1);
      mine_.push_back(chunk);
    }
    ring(place_.doorbell);
  }

  void give(std::size_t count) {
    std::shuffle(mine_.begin(), mine_.end(), random_);
    indices const given{mine_.end() - static_cast<std::ptrdiff_t>(count), mine_.end()};
    mine_.resize(mine_.size() - count);
    for (auto const chunk : given) {
      remove_mark(place_, chunk, slot_);
    }
    mailbox_.release(given);
    ring(place_.doorbell);
  }

  /// Until nothing of this client is on its way in either direction.
  void park() {
    mailbox_.withdraw();
    for (;;) {
      auto const round = place_.record.round.load();
      if (!goes_on(place_) || place_.record.now.load() == phase::run) {
        return;
      }
      mailbox_.resolve();
      bool const resolved = mailbox_.answered() && !mailbox_.has_mail();
      place_.record.parked[slot_].store(resolved ? round : 0);
      ring(resolved ? place_.progress : place_.doorbell);
      await(place_.bells.at(slot_));
    }
  }

  members_place const& place_;
  std::uint32_t slot_;
  std::mt19937_64 random_;
  client_mailbox mailbox_;
  std::uint32_t demand_;
  indices mine_;
};

class server_member {
 public:
  server_member(members_place const& place, std::uint64_t seed)
      : place_(place), random_(seed), writer_(place.view) {
    for (std::uint32_t slot = 0; slot < member_clients; ++slot) {
      lend_bell(slot);
    }
  }

  void live() {
    while (goes_on(place_)) {
      if (place_.record.server_leaves.load() != 0) {
        give(mine_.size());
        return;
      }
      if (auto const slot = place_.record.to_reclaim.load(); slot != 0) {
        writer_.reclaim(slot - 1);
        lend_bell(slot - 1);
        place_.record.to_reclaim.store(0);
        ring(place_.progress);
      }
      auto const round = place_.record.round.load();
      switch (place_.record.now.load()) {
        case phase::run:
          step();
          count_operation(place_);
          break;
        case phase::clients_park:
          writer_.set_wanted(0);
          await(place_.doorbell);
          writer_.pump();
          break;
        default:
          place_.record.parked[server_slot].store(round);
          ring(place_.progress);
          await(place_.doorbell);
      }
    }
  }

 private:
  void lend_bell(std::uint32_t slot) {
    writer_.set_bell(slot, unique_fd{::dup(place_.bells.at(slot))});
  }

  /// Does not wait, so that a signal finds it at work.
  void step() {
    switch (random_() % 8) {
      case 0: {
        auto const count = below(random_, 8);
        auto const taken = writer_.take(count, server_slot);
        check(taken.size() <= count, "serving got more than it took");
        for (auto const chunk : taken) {
          put_mark(place_, chunk, server_slot);
          place_.record.used[chunk].store(1);
          mine_.push_back(chunk);
        }
        break;
      }
      case 1:
        give(below(random_, mine_.size() + 1));
        break;
      case 2:
        writer_.demand(below(random_, member_clients), below(random_, 5));
        break;
      case 3:
        writer_.set_reserve(below(random_, member_chunks / 4));
        writer_.set_wanted(random_() % 4 == 0 ? below(random_, member_chunks) : 0);
        break;
      default:
        writer_.pump();
    }
  }

  void give(std::size_t count) {
    std::shuffle(mine_.begin(), mine_.end(), random_);
    indices const given{mine_.end() - static_cast<std::ptrdiff_t>(count), mine_.end()};
    mine_.resize(mine_.size() - count);
    for (auto const chunk : given) {
      remove_mark(place_, chunk, server_slot);
    }
    writer_.give_back(given);
  }

  members_place const& place_;
  std::mt19937_64 random_;
  ledger_writer writer_;
  indices mine_;
};

/// The steps that layout.hpp draws.
bool may_follow(owner before, owner after) {
  bool const was_free = before == owner::free || before == owner::dirty;
  return was_free ? is_owned(after) : after == owner::dirty;
}

}  // namespace

client_traits const& kind_in(std::uint32_t slot) {
  constexpr std::uint32_t jobs = 2;
  return traits_of(slot == server_slot ? client_kind::server
                   : slot < jobs       ? client_kind::training
                                       : client_kind::engine);
}

void run_member(members_place const& place, std::function<void(members_place const&)> const& what) {
  try {
    what(place);
  } catch (std::exception const& why) {
    if (place.record.failed.exchange(1) == 0) {
      std::strncpy(place.record.failure, why.what(), sizeof place.record.failure - 1);
      place.record.failed.store(2);
    }
    ring(place.progress);
  }
}

void be_client(members_place const& place, std::uint32_t slot, std::uint64_t seed) {
  client_member{place, slot, seed}.live();
}

void be_server(members_place const& place, std::uint64_t seed) {
  server_member{place, seed}.live();
}

void be_observer(members_place const& place) {
  std::vector<std::uint64_t> seen(member_chunks);
  while (goes_on(place)) {
    for (std::uint32_t chunk = 0; chunk < member_chunks; ++chunk) {
      auto const word = place.view.chunks()[chunk].load(std::memory_order_acquire);
      auto const before = chunk_state::unpack(seen[chunk]);
      auto const now = chunk_state::unpack(word);
      auto const name = "chunk " + std::to_string(chunk);
      check(now.epoch >= before.epoch, name + " went back to an earlier epoch");
      check(now.epoch != before.epoch || word == seen[chunk], name + " changed within an epoch");
      check(now.epoch != before.epoch + 1 || may_follow(before.who, now.who),
            name + " took a step that there is not");
      seen[chunk] = word;
    }
  }
}

std::string disagreement(members_place const& place) {
  std::uint32_t free = 0;
  for (std::uint32_t chunk = 0; chunk < member_chunks; ++chunk) {
    auto const state = place.view.chunk(chunk);
    free += state.is_free() ? 1 : 0;
    auto const owned = state.is_free() ? 0 : state.client + 1U;
    if (owned != place.record.mark[chunk]) {
      return "chunk " + std::to_string(chunk) + " is slot " + std::to_string(owned) +
             "'s in the ledger and slot " + std::to_string(place.record.mark[chunk]) +
             "'s by its mark (0: nobody's, else one more)";
    }
    if (!state.is_free() && state.who != kind_in(state.client).owns) {
      return "chunk " + std::to_string(chunk) + " has an owner of the wrong kind";
    }
  }
  auto const grantable = place.view.header().grantable.load();
  return grantable > free ? std::to_string(grantable) + " chunks are promised and " +
                                std::to_string(free) + " are free"
                          : "";
}

}  // namespace sluice::memhandover::trials
