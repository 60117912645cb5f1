#include "nccl_shim/calls/communicators.hpp"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nccl_shim/agreement/clock.hpp"
#include "nccl_shim/agreement/hosts.hpp"
#include "nccl_shim/calls/domain.hpp"
#include "nccl_shim/calls/graphs.hpp"
#include "nccl_shim/calls/pending_calls.hpp"

namespace sluice::nccl_shim {
namespace {

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

/// Grows with each change of what the registry holds.
constinit std::atomic<std::uint64_t> registry_version{1};

/// Threads that look at what they have found last.
constinit std::atomic<unsigned> submitting{0};

/// While it lives nothing of what `find_again` finds goes.
class submission_under_way {
 public:
  submission_under_way() noexcept { submitting.fetch_add(1, std::memory_order_seq_cst); }
  submission_under_way(submission_under_way const&) = delete;
  submission_under_way& operator=(submission_under_way const&) = delete;
  ~submission_under_way() { submitting.fetch_sub(1, std::memory_order_release); }
};

void registry::know(communicator which, std::shared_ptr<known_communicator> one) {
  // Before the look at who submits: whoever begins to from here on finds what is known from now on.
  registry_version.fetch_add(1, std::memory_order_seq_cst);
  if (auto before = all.extract(which); !before.empty()) {
    still_called.push_back(std::move(before.mapped()));
  }
  if (submitting.load(std::memory_order_seq_cst) == 0) {
    std::erase_if(still_called, [](auto const& gone) {
      return gone->being_called.load(std::memory_order_seq_cst) == 0;
    });
  }
  if (one != nullptr) {
    all.emplace(which, std::move(one));
  }
}

/// Threads that wait for what was left to the gate.
constinit std::atomic<unsigned> flushing{0};

registry& the_registry() {
  static registry& one = *std::make_unique<registry>().release();  // threads call until the end
  return one;
}

std::shared_ptr<known_communicator> find(communicator which) {
  registry& in = the_registry();
  std::shared_lock const guard{in.lock};
  auto const found = in.all.find(which);
  return found != in.all.end() ? found->second : nullptr;
}

/// What a thread has called last, as long as the registry does not change. To be looked at while a submission is under
/// way.
struct last_called {
  communicator which;
  known_communicator* known;
  cut* agreement;  // nullptr: its ranks do not agree
  std::uint64_t version;
};

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

/// The same; one that is not known yet is from now on.
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

/// The communicator of each call.
std::vector<std::shared_ptr<known_communicator>> of_each(std::span<collective const> calls) {
  std::vector<std::shared_ptr<known_communicator>> of;
  of.reserve(calls.size());
  for (std::size_t at = 0; at < calls.size(); ++at) {
    bool const is_same = at > 0 && calls[at].on == calls[at - 1].on;
    of.push_back(is_same ? of.back() : know(calls[at].on));
  }
  return of;
}

/// Whether its ranks can tell each other that they have come to its calls.
bool can_notify_each_other(std::shared_ptr<known_communicator> const& known) {
  return known->ranks != nullptr && known->ranks->all_have_places();
}

bool has_trouble(std::shared_ptr<known_communicator> const& known) {
  return known->trouble() != success;
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

void may_pause(int may) {
  publish_need(&registry::may_pause, may != 0);
}

/// The communicators whose ranks agree, but for those that are given up: nothing of them will be made any more.
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

int resolve(std::int64_t deadline_ns) {
  auto const all = agreeing();
  return std::all_of(all.begin(), all.end(),
                     [deadline_ns](auto const& known) {
                       return known->ranks->resolve(deadline_ns) == outcome::granted;
                     })
             ? 1
             : 0;
}

void allow_inside(int allow) {
  allow_inside_micro_batches(allow != 0);
  publish_need(&registry::works_together, allow != 0);
}

int end_with(void* communicator) {
  auto const which = static_cast<nccl_shim::communicator>(communicator);
  auto const known = find(which);
  return known != nullptr && make_domain(which, known) ? 1 : 0;
}

int keep_micro_batch(void (*keep)(void* of), void* of) {
  auto const at = end_of_micro_batch(gate()->micro_batch());
  if (!at) {
    keep(of);
    return 1;
  }
  return hand_over_end(*at, keep, of) ? 1 : 0;
}

void run_micro_batch_again() {
  if (auto const known = the_domain(); known != nullptr) {
    known->ranks->agreement().begin_epoch();
  }
}

/// The calling thread's micro-batch has the call; there may be none.
place_inside take_in(std::span<collective const> calls,
                     std::shared_ptr<known_communicator> const& known) {
  std::uint64_t const micro_batch = gate()->micro_batch();
  return micro_batch != 0 ? inside_micro_batch(micro_batch, calls, known) : place_inside{};
}

void complain_of_place(char const* called, char const* why) {
  std::fprintf(stderr, "sluice: %s inside of a micro-batch: %s\n", called, why);
}

/// Makes what cannot be made at once.
int submit_in_turn(std::span<collective const> calls) {
  auto const of = of_each(calls);
  auto const troubled = std::ranges::find_if(of, has_trouble);
  if (troubled != of.end()) {
    return (*troubled)->trouble();
  }
  if (auto const captured = capture(calls, of)) {
    return *captured;
  }
  auto place = take_in(calls, of.front());
  if (place.why_not != nullptr) {
    complain_of_place((std::string{name_of(calls.front().what)} + " was called").c_str(),
                      place.why_not);
    return invalid_usage;
  }
  bool const is_exchange = !are_of_all(calls) && std::ranges::all_of(of, can_notify_each_other);
  return is_exchange ? hand_over_exchange(calls, parts_of(calls, of))
                     : hand_over(calls, of.front(), std::move(place.of));
}

/// A graph that is not one number is launched between micro-batches only: with those that exchange something with
/// it, or, if they cannot tell each other, without asking.
sluice_graph_result agree_on_launch(void* held, sluice_graph_launch const* launch,
                                    sluice_agreed_call* call) {
  auto const& graph = *static_cast<graph_calls const*>(held);
  if (std::ranges::any_of(graph.parts, has_trouble, &exchange_part::of)) {
    return SLUICE_GRAPH_REFUSED;
  }
  auto const& of = graph.parts.front().of;
  place_inside place;
  if (graph.is_one) {
    place = take_in({&graph.first, 1}, of);
  } else if (gate()->micro_batch() != 0) {
    place.why_not = "it is not of all ranks of one communicator alone";
  }
  if (place.why_not != nullptr) {
    complain_of_place((to_text(graph.alike) + " was launched").c_str(), place.why_not);
    return SLUICE_GRAPH_REFUSED;
  }
  if (graph.is_one && of->ranks == nullptr) {
    return SLUICE_GRAPH_PASSES;  // which has been told when the communicator was made
  }
  if (!graph.is_one &&
      !std::ranges::all_of(graph.parts, can_notify_each_other, &exchange_part::of)) {
    static std::atomic<bool> warned{false};
    if (!warned.exchange(true)) {
      std::fputs(
          "sluice: a CUDA graph has collectives of several communicators, or sends and receives, "
          "and not all of its ranks are processes of this host under `sluice run`: they do not "
          "agree on its launches, and a pause may wait for other ranks\n",
          stderr);
    }
    return SLUICE_GRAPH_PASSES;
  }
  *call = graph.is_one ? as_agreed(graph.alike, of, std::move(place.of), *launch)
                       : as_exchange(graph.alike, graph.parts, *launch);
  return SLUICE_GRAPH_AGREED;
}

constexpr sluice_agreement offered{.size = sizeof(sluice_agreement),
                                   .may_pause = may_pause,
                                   .resolve = resolve,
                                   .allow_inside = allow_inside,
                                   .end_with = end_with,
                                   .keep = keep_micro_batch,
                                   .run_again = run_micro_batch_again,
                                   .join = join_graphs,
                                   .release = release_graph,
                                   .agree_on_launch = agree_on_launch};

/// As the library is loaded.
[[gnu::constructor]] void offer_agreement() {
  if (gate() != nullptr) {
    gate()->set_agreement(&offered);
  }
}

}  // namespace

void* real_function(char const* name) noexcept {
  // By its handle, since libraries that are opened locally are in nobody else's scope.
  void* const library = ::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return ::dlsym(RTLD_NEXT, name);
  }
  void* const found = ::dlsym(library, name);
  ::dlclose(library);  // one reference less; it stays for those who have it loaded
  return found;
}

[[gnu::hot]] bool is_watching() noexcept {
  return !inside_nccl::here() && gate() != nullptr;
}

bool lags_behind_others() {
  auto const all = agreeing();
  return std::any_of(all.begin(), all.end(),
                     [](auto const& known) { return known->ranks->lags(); });
}

bool holds(void const* address) noexcept {
  return gate()->holds(reinterpret_cast<std::uint64_t>(address)) != 0;
}

void flush() noexcept {
  flushing.fetch_add(1, std::memory_order_seq_cst);
  gate()->flush();
  flushing.fetch_sub(1, std::memory_order_seq_cst);
}

bool is_flushing() noexcept {
  return flushing.load(std::memory_order_seq_cst) != 0;
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

std::optional<std::string> key_of_child(communicator parent, int colour) {
  auto const known = find(parent);
  if (known == nullptr || known->ranks == nullptr) {
    return std::nullopt;
  }
  auto key = known->ranks->key() + '-' + std::to_string(known->ranks->next_child());
  return colour == no_colour ? std::nullopt : std::optional{key + '-' + std::to_string(colour)};
}

[[gnu::hot]] int submit(std::span<collective const> calls) {
  {
    submission_under_way const now;
    auto const& last = find_again(calls.front().on);
    if (last.agreement != nullptr && last.known->trouble() == success && are_of_all(calls)) {
      if (auto const made = make_at_once(calls, *last.known, *last.agreement)) {
        return *made;
      }
    }
  }
  return submit_in_turn(calls);
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
