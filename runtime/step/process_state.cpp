#include "runtime/step/process_state.hpp"

#include <pthread.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/environment.hpp"
#include "memhandover/base/numbers.hpp"
#include "memhandover/base/shared_text.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "runtime/step/rank_absence.hpp"
#include "runtime/step/run_ahead_choice.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::step {
namespace {

using memhandover::backend_kind;

/// How often the ledger's header is looked at, though nobody rings.
constexpr std::chrono::milliseconds look_every{100};

std::atomic<process_state*> shared_state{nullptr};
std::atomic<bool> in_child{false};

/// The number that a variable is set to, if it is. Throws `invalid_argument` if that is none, or negative.
template <typename Number>
std::optional<Number> number_of(char const* name, char const* kind) {
  auto const text = environment(name);
  auto const number = parse_number<Number>(text);
  if (!text.empty() && (!number || *number < Number{})) {
    throw error{error_kind::invalid_argument, std::string{name} + " is \"" +
                                                  memhandover::readable_text(text) +
                                                  "\", must be " + kind + "; correct or unset it"};
  }
  return number;
}

/// On the host a fork copies the pool's pages; on CUDA the child's device is the driver's business.
process_state* sharing_on_host() noexcept {
  auto* const state = sharing();
  return state != nullptr && state->backend == backend_kind::host ? state : nullptr;
}

void before_fork() {
  if (auto* const state = sharing_on_host()) {
    state->memory->before_fork();
  }
}

void after_fork_in_parent() {
  if (auto* const state = sharing_on_host()) {
    state->memory->after_fork_in_parent();
  }
}

void after_fork_in_child() {
  if (auto* const state = sharing_on_host()) {
    state->memory->after_fork_in_child();
  }
  in_child.store(true);
}

/// Handlers of exit(3) run in the order opposite to that in which they were registered, and the driver's was before: as it goes down,
/// whoever is within it may crash.
void leave_at_exit() {
  if (auto* const state = sharing()) {
    state->memory->leave();
  }
}

/// If a server has come: waits for a moment until this process is as far as the other ranks.
void resolve_with_others(process_state const& state) {
  constexpr std::chrono::nanoseconds moment = std::chrono::milliseconds{2};
  if (state.gate != nullptr) {
    state.gate->resolve(memhandover::monotonic_ns() + moment.count());
  }
}

/// Shows what takes the device longer than the bound.
void publish_long_units(process_state& state) {
  auto const bound = [&state] {
    std::lock_guard const lock{state.run_ahead_mutex};
    return state.run_ahead;
  }();
  std::size_t used = 0;
  auto& places = state.memory->client().mailbox().long_units;
  if (state.gate_table != nullptr && bound.count() > 0) {
    sluice_gate_long_unit unit{};
    for (; used < std::size(places) && state.gate_table->long_unit(used, &unit) != 0 &&
           unit.nanoseconds > bound.count();
         ++used) {
      auto& place = places[used];
      memhandover::store_text(place.name, unit.name);
      place.nanoseconds.store(static_cast<std::uint64_t>(unit.nanoseconds));
      place.times.store(unit.times);
    }
  }
  for (; used < std::size(places); ++used) {
    places[used].times.store(0);
  }
}

/// What keeps the whole job from being parked, and how long a rank may be away.
void set_parking(training_memory::options& into) {
  using memhandover::unparkable;
  into.why_unparkable =
      environment_says("SLUICE_PARK", "never", "if_needed") ? unparkable::never : unparkable::none;
  into.longest_absence =
      longest_absence(environment("WORLD_SIZE"), environment("SLUICE_COLLECTIVE_TIMEOUT_S"));
}

/// Says once that requests are refused because of what this job keeps.
void log_refusal(process_state& state) {
  auto const& client = state.memory->client();
  auto const refused = client.view().controls()[client.slot()].refused.load();
  if (refused <= state.refused_logged) {
    return;
  }
  state.refused_logged = refused;
  auto const shape = client.view().shape();
  auto const kept = client.mailbox().kept_chunks.load();
  auto const least =
      standing_of(client.view().clients()[client.slot()], shape.chunk_count).least_chunks;
  say("the inference server wants " + format_bytes(refused * shape.chunk_bytes) +
      " of the pool's " + format_bytes(shape.bytes()) +
      " at once, which cannot be had while training runs: this job keeps " +
      format_bytes(kept * shape.chunk_bytes) +
      " (parameters, gradients, optimizer state, data) whatever is demanded. Its requests are "
      "refused, and nothing is "
      "taken from training for them. A larger pool would help (--memory of `sluice run`, "
      "pool.memory of the policy)" +
      (least == 0 ? std::string{}
                  : ", or a smaller minimum of this job (--min-memory), now " +
                        format_bytes(least * shape.chunk_bytes)));
}

/// From now on the server is told when this process has its device compute.
void report_work(process_state& state) {
  if (state.gate_table == nullptr) {
    state.operators_watch = new operator_watch{*state.work, state.memory->operators()};
    return;
  }
  static sluice_launch_watcher const watcher{
      sizeof(sluice_launch_watcher), state.work.get(),
      [](void* of) { static_cast<memhandover::work_report*>(of)->begins(); },
      [](void* of, int waited) {
        static_cast<memhandover::work_report*>(of)->drained(waited != 0);
      }};
  if (state.gate_table->watch_launches(&watcher) != 0) {
    say("training is not held while this engine computes");
  }
}

}  // namespace

process_state* sharing() noexcept {
  return in_child.load(std::memory_order_relaxed) ? nullptr
                                                  : shared_state.load(std::memory_order_acquire);
}

process_state* inherited() noexcept {
  return in_child.load(std::memory_order_relaxed) ? shared_state.load(std::memory_order_acquire)
                                                  : nullptr;
}

void refuse_child() {
  if (inherited() != nullptr) {
    throw error{error_kind::unsupported,
                "a forked child of a training process cannot train in the pool; have it started "
                "anew (a start method that spawns), so that it is a job of its own"};
  }
}

void share(std::unique_ptr<process_state> state) {
  static std::once_flag once;
  std::call_once(once, [] {
    ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    std::atexit(leave_at_exit);
  });
  if (is_engine(*state)) {
    auto const& client = state->memory->client();
    state->work =
        std::make_unique<memhandover::work_report>(client.mailbox(), client.files().doorbell.get());
    report_work(*state);
  }
  auto* const kept = state.release();
  shared_state.store(kept, std::memory_order_release);
  if (environment_says("SLUICE_CONTROL_THREAD", "awake", "asleep")) {
    kept->memory->client().stay_awake();
  }
  // A job that knows nothing of micro-batches is bounded as well.
  kept->memory->client().watch(
      [kept] {
        bound_run_ahead(*kept);
        if (kept->work) {
          kept->work->renew();
        }
        resolve_with_others(*kept);
        publish_long_units(*kept);
        log_refusal(*kept);
        kept->memory->publish_stranded();
      },
      look_every);
}

bool is_engine(process_state const& state) noexcept {
  return state.memory->kind() == memhandover::client_kind::engine;
}

void bound_run_ahead(process_state& state) {
  if (is_engine(state)) {
    return;
  }
  static auto const own = run_ahead_of_job(environment("SLUICE_RUN_AHEAD_US"));
  auto const& client = state.memory->client();
  auto const wanted = choose_run_ahead(client.view().header(), own);
  std::lock_guard const lock{state.run_ahead_mutex};
  if (wanted == state.run_ahead) {
    return;
  }
  state.run_ahead = wanted;
  client.mailbox().run_ahead_ns.store(static_cast<std::uint64_t>(wanted.count()),
                                      std::memory_order_relaxed);
  if (state.gate != nullptr) {
    state.gate->may_pause(wanted.count() > 0);
    state.gate_table->set_run_ahead(wanted.count());
  }
}

void refuse_other_gpu(memhandover::broker_options const& broker, int device) {
  if (broker.device.value_or(device) != device) {
    throw error{error_kind::invalid_argument,
                "GPU " + std::to_string(*broker.device) +
                    " is to be shared (--device, SLUICE_DEVICE), and this process uses GPU " +
                    std::to_string(device) + "; both must be the same"};
  }
}

training_memory::options options_of_job(char const* backend) {
  static std::once_flag once;
  std::call_once(once, [] { telemetry::set_up_logging("sluice-training", "warn"); });
  training_memory::options options;
  options.broker.runtime_dir = environment("SLUICE_RUNTIME_DIR");
  options.broker.backend = backend;
  options.broker.device = number_of<int>("SLUICE_DEVICE", "the number of a GPU, from 0 on");
  options.broker.pool_bytes =
      number_of<std::uint64_t>("SLUICE_POOL_BYTES",
                               "a number of bytes (`sluice run --memory` sets it, from 4GiB)")
          .value_or(0);
  auto const name = environment("SLUICE_NAME");
  options.kind = environment_says("SLUICE_ROLE", "engine", "training")
                     ? memhandover::client_kind::engine
                     : memhandover::client_kind::training;
  if (options.kind == memhandover::client_kind::training) {
    options.wish =
        memhandover::job_wish_in(environment("SLUICE_PRIORITY"), environment("SLUICE_MIN_MEMORY"));
  }
  options.name = name.empty() ? memhandover::traits_of(options.kind).name : name;
  set_parking(options);
  return options;
}

bool environment_says(char const* name, char const* word, char const* usual) {
  auto const text = environment(name);
  if (!text.empty() && text != word && text != usual) {
    spdlog::warn("{} is {}, must be {} or {}; {} is used", name, memhandover::readable_text(text),
                 word, usual, usual);
  }
  return text == word;
}

void say(std::string const& text) {
  std::fprintf(stderr, "sluice: %s\n", text.c_str());
}

std::string& last_error() noexcept {
  static thread_local std::string text;
  return text;
}

}  // namespace sluice::step

extern "C" {

char const* sluice_last_error(void) {
  return sluice::step::last_error().c_str();
}

int sluice_backend(void) {
  auto* const state = sluice::step::sharing();
  return state == nullptr ? 0 : static_cast<int>(state->backend);
}
}
