#include "nccl_shim/calls/communicators.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "nccl_shim/agreement/clock.hpp"
#include "nccl_shim/agreement/hosts.hpp"
#include "nccl_shim/calls/domain.hpp"
#include "nccl_shim/calls/surroundings.hpp"

namespace sluice::nccl_shim {

constinit std::atomic<unsigned> submission_under_way::submitting{0};

namespace {

/// Grows with each change of what the registry holds.
constinit std::atomic<std::uint64_t> registry_version{1};

/// All that this process knows of.
struct registry {
  std::shared_mutex lock;
  std::unordered_map<communicator, std::shared_ptr<known_communicator>> all;  // guarded by lock
  bool may_pause = false;       // this process, so that others must be asked; likewise
  bool works_together = false;  // in micro-batches, likewise
  /// Communicators that are gone, but not from under the feet of whoever was about to call one, or in the middle of a
  /// call that was aborted.
  std::vector<std::shared_ptr<known_communicator>> still_called;  // likewise
  [[nodiscard]] bool must_agree() const noexcept { return may_pause || works_together; }
  /// What is known of one from now on; nullptr: nothing. To be called with the lock.
  void know(communicator which, std::shared_ptr<known_communicator> one);
};

void registry::know(communicator which, std::shared_ptr<known_communicator> one) {
  // Before the look at who submits: whoever begins to from here on finds what is known from now on.
  registry_version.fetch_add(1, std::memory_order_seq_cst);
  if (auto before = all.extract(which); !before.empty()) {
    still_called.push_back(std::move(before.mapped()));
  }
  if (submission_under_way::is_over()) {
    std::erase_if(still_called, [](auto const& gone) {
      return gone->being_called.load(std::memory_order_seq_cst) == 0;
    });
  }
  if (one != nullptr) {
    all.emplace(which, std::move(one));
  }
}

registry& the_registry() {
  static registry& one = *std::make_unique<registry>().release();  // threads call until the end
  return one;
}

/// Whoever asks for errors has work under way, which never ends without the rank that has died: nobody
/// else may be waiting who would see that. Work that has ended is asked about for a moment longer, and
/// then its ranks may leave as they like.
void fail_if_others_died(known_communicator& of) noexcept {
  constexpr std::chrono::nanoseconds moment = std::chrono::seconds{2};
  of.ranks->look_for_deaths();
  if (!of.ranks->agreement().lost()) {
    return;
  }
  std::int64_t const now = monotonic_ns();
  std::int64_t seen = 0;
  if (!of.death_seen_ns.compare_exchange_strong(seen, now, std::memory_order_acq_rel) &&
      now - seen > moment.count() && of.trouble() == success) {
    // Said first: whoever sees the error may end the process.
    std::fprintf(stderr, "sluice: %s; what has been begun with it does not end\n",
                 of.ranks->loss().c_str());
    of.fail(remote_error);
  }
}

/// Tells the ranks of all communicators whether this process needs to agree with them.
void publish_need(bool registry::*why, bool holds) {
  registry& in = the_registry();
  std::lock_guard const guard{in.lock};
  in.*why = holds;
  for (auto const& [_, known] : in.all) {
    if (known->ranks != nullptr) {
      known->ranks->need(in.must_agree());
    }
  }
}

}  // namespace

std::shared_ptr<known_communicator> find(communicator which) {
  registry& in = the_registry();
  std::shared_lock const guard{in.lock};
  auto const found = in.all.find(which);
  return found != in.all.end() ? found->second : nullptr;
}

[[gnu::hot]] last_called const& find_again(communicator which) {
  thread_local constinit last_called last [[gnu::tls_model("initial-exec")]]{};
  std::uint64_t const version = registry_version.load(std::memory_order_seq_cst);
  if (last.which != which || last.version != version) [[unlikely]] {
    auto* const known = find(which).get();
    bool const agrees = known != nullptr && known->ranks != nullptr;
    last = {which, known, agrees ? &known->ranks->agreement() : nullptr, version};
  }
  return last;
}

std::shared_ptr<known_communicator> know(communicator which) {
  if (auto known = find(which); known != nullptr) {
    return known;
  }
  registry& in = the_registry();
  std::lock_guard const guard{in.lock};
  if (auto const found = in.all.find(which); found != in.all.end()) {
    return found->second;  // by another thread since
  }
  auto made = std::make_shared<known_communicator>();
  in.know(which, made);
  return made;
}

std::vector<std::shared_ptr<known_communicator>> agreeing() {
  std::vector<std::shared_ptr<known_communicator>> all;
  registry& in = the_registry();
  std::shared_lock const guard{in.lock};
  for (auto const& [_, known] : in.all) {
    if (known->ranks != nullptr && !known->given_up.load(std::memory_order_seq_cst)) {
      all.push_back(known);
    }
  }
  return all;
}

bool others_may_wait() {
  registry& in = the_registry();
  std::shared_lock const guard{in.lock};
  return std::any_of(in.all.begin(), in.all.end(), [](auto const& each) {
    return each.second->ranks == nullptr && !each.second->given_up.load(std::memory_order_seq_cst);
  });
}

bool lags_behind_others() {
  auto const all = agreeing();
  return std::any_of(all.begin(), all.end(),
                     [](auto const& known) { return known->ranks->lags(); });
}

void may_pause(bool may) {
  publish_need(&registry::may_pause, may);
}

void works_together(bool together) {
  publish_need(&registry::works_together, together);
}

std::unique_ptr<rank_group> join(std::string const& key) {
  char const* const folder = std::getenv("SLUICE_RUNTIME_DIR");
  if (folder == nullptr || *folder == '\0') {
    return nullptr;
  }
  board const* const own = the_board();
  return rank_group::join(folder, key, store_of_job(),
                          own != nullptr ? std::optional{own->place()} : std::nullopt);
}

void enlist(communicator made, std::unique_ptr<rank_group> of) {
  auto known = std::make_shared<known_communicator>();
  int ranks = 0;
  int rank = 0;
  bool agrees = false;
  {
    inside_nccl const here;
    auto* const count = real<"ncclCommCount", int(communicator, int*)>();
    auto* const own = real<"ncclCommUserRank", int(communicator, int*)>();
    agrees = of != nullptr && count(made, &ranks) == success && own(made, &rank) == success;
  }
  if (agrees && of->complete(static_cast<unsigned>(rank), static_cast<unsigned>(ranks))) {
    known->ranks = std::move(of);
  } else if (agrees && rank == 0) {
    std::fprintf(stderr,
                 "sluice: %s: its ranks do not agree where they pause, and a pause may wait for "
                 "others\n",
                 of->why_alone(static_cast<unsigned>(ranks)).c_str());
  }
  registry& in = the_registry();
  std::lock_guard const guard{in.lock};
  if (known->ranks != nullptr) {
    known->ranks->need(in.must_agree());
  }
  in.know(made, std::move(known));
}

std::string key_of(unique_id const& id) {
  // The id tells this communicator from all others; the name of a file must be short and plain.
  constexpr std::uint64_t prime = 0x100000001b3;
  std::uint64_t one = 0xcbf29ce484222325;
  std::uint64_t other = 0x9e3779b97f4a7c15;
  for (char const byte : id.bytes) {
    one = (one ^ static_cast<unsigned char>(byte)) * prime;
    other = (other + static_cast<unsigned char>(byte)) * 0xd6e8feb86659fd93;
    other ^= other >> 32U;
  }
  std::array<char, 33> text{};
  std::snprintf(text.data(), text.size(), "%016llx%016llx", static_cast<unsigned long long>(one),
                static_cast<unsigned long long>(other));
  return text.data();
}

std::optional<std::string> key_of_child(communicator parent, int colour) {
  auto const known = find(parent);
  if (known == nullptr || known->ranks == nullptr) {
    return std::nullopt;
  }
  auto key = known->ranks->key() + '-' + std::to_string(known->ranks->next_child());
  return colour == no_colour ? std::nullopt : std::optional{key + '-' + std::to_string(colour)};
}

int error_of(communicator which) noexcept {
  auto const known = find(which);
  if (known == nullptr) {
    return success;
  }
  if (known->ranks != nullptr && known->may_look_around()) {
    fail_if_others_died(*known);
    // The other rank may have found it, and this one's call be under way.
    if (known->ranks->agreement().difference()) {
      known->fail_by_difference();
    }
  }
  return known->error.load(std::memory_order_acquire);
}

void give_up(communicator which) noexcept {
  constexpr std::chrono::nanoseconds patience = std::chrono::seconds{1};
  auto const known = know(which);
  known->given_up.store(true, std::memory_order_seq_cst);
  // Not for what is still to be called: the device that all that waits for may be waiting for the abort.
  std::int64_t const until = monotonic_ns() + patience.count();
  while (known->being_called.load(std::memory_order_seq_cst) != 0 && monotonic_ns() < until) {
    ::sched_yield();
  }
}

void bury(communicator which) noexcept {
  auto grave = std::make_shared<known_communicator>();
  grave->given_up.store(true, std::memory_order_seq_cst);
  registry& in = the_registry();
  std::lock_guard const guard{in.lock};
  in.know(which, std::move(grave));
}

void forget(communicator which) noexcept {
  {
    registry& in = the_registry();
    std::lock_guard const guard{in.lock};
    in.know(which, nullptr);
  }
  forget_domain(which);
}

}  // namespace sluice::nccl_shim
