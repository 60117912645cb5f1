#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>

#include "memhandover/base/bytes.hpp"
#include "runtime/server/engines/detail/engine_host_impl.hpp"
#include "runtime/server/inference/caught_error.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using error_code = boost::system::error_code;
using namespace std::chrono_literals;
using std::chrono::milliseconds;

/// How often the pool is asked after engines with which nothing happens: somebody else may park or wake one.
constexpr milliseconds look_every{1000};
/// The same while memory goes, and while it comes.
constexpr milliseconds while_going{20}, while_coming{5};
/// A device that is still busy then may be so for ever.
constexpr std::chrono::seconds going_patience{30};
/// Of `server.request_timeout`, so that who waits hears why before his time is over.
constexpr double share_of_timeout = 0.9;
/// How long the server has to make room before idle engines do.
constexpr milliseconds others_first{300};
/// Of who could not get memory.
constexpr std::chrono::seconds try_again_after{1};

}  // namespace

engine_state engine_host::impl::state_of(std::size_t which) const {
  std::lock_guard const lock{mutex_};
  return engines_[which].state;
}

/// On another thread; `then` on this one, unless the process has ended by then.
void engine_host::impl::ask_broker(
    std::size_t which, std::function<engine_share(pid_t root)> question,
    std::function<void(engine_share const&, std::string const&)> then) {
  auto const root = engines_[which].now.process->keeper_pid();
  net::post(broker_, [this, which, root, question = std::move(question), then = std::move(then)] {
    engine_share seen;
    std::string failure;
    try {
      seen = question(root);
    } catch (...) {
      failure = caught_error().what();
      if (failure.empty()) failure = "the broker does not answer";
    }
    net::post(io_, [this, which, root, then, seen = std::move(seen), failure] {
      if (is_run_of(which, root)) then(seen, failure);
    });
  });
}

void engine_host::impl::after(std::size_t which, milliseconds pause,
                              void (impl::*next)(std::size_t)) {
  auto& timer = *engines_[which].now.parking_timer;
  timer.expires_after(pause);
  timer.async_wait([this, which, next](error_code cancelled) {
    if (!cancelled) (this->*next)(which);
  });
}

// ---- who is idle

/// Under the mutex.
std::optional<engine_host::impl::clock::time_point> engine_host::impl::idle_end(
    entry const& engine) const {
  auto const timeout = idle_timeout_of(engine);
  bool const is_idle = engine.state == engine_state::ready && !engine.is_doubted &&
                       !engine.is_shared && engine.inside.empty() && engine.waiting.empty();
  bool const has_memory = engine.share && engine.share->resident_bytes() > 0;
  if (!timeout || !is_idle || !has_memory) return std::nullopt;
  return engine.idle_since + std::chrono::duration_cast<clock::duration>(*timeout);
}

/// Again and again: parks who has been idle for long enough, and asks what the pool says of all.
void engine_host::impl::watch() {
  if (!pool_ || is_ending_) return;
  park_idle();
  if (clock::now() >= next_watch_) {
    next_watch_ = clock::now() + look_every;
    look_at_all();
  }
  watch_again();
}

void engine_host::impl::look_at_all() {
  std::vector<std::size_t> which;
  std::vector<pid_t> roots;
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (!engines_[i].now.process || !engines_[i].is_tenant()) continue;
    which.push_back(i);
    roots.push_back(engines_[i].now.process->keeper_pid());
  }
  if (which.empty()) return;
  net::post(broker_, [this, which = std::move(which), roots = std::move(roots)] {
    try {
      net::post(io_, [this, which, roots, seen = pool_->look(roots)] {
        on_all_seen(which, roots, seen);
      });
    } catch (std::exception const&) {  // one that does not answer is asked again
    }
  });
}

void engine_host::impl::on_all_seen(std::vector<std::size_t> const& which,
                                    std::vector<pid_t> const& roots,
                                    std::vector<engine_share> const& seen) {
  for (std::size_t i = 0; i < which.size(); ++i) {
    if (is_run_of(which[i], roots[i])) on_seen(which[i], seen[i]);
  }
}

/// It is the same run of the engine still.
bool engine_host::impl::is_run_of(std::size_t which, pid_t root) const {
  auto const& process = engines_[which].now.process;
  return process && process->keeper_pid() == root && !is_ending_;
}

/// Whether it has requests, so that a demand takes others' memory first.
void engine_host::impl::say_use(std::size_t which) {
  if (!engines_[which].now.process) return;  // it is told when it has memory
  bool is_used = false;
  {
    std::lock_guard const lock{mutex_};
    is_used = engines_[which].is_used;
  }
  ask_broker(
      which,
      [this, is_used](pid_t root) {
        auto const seen = pool_->look(root);
        pool_->note(seen, is_used);
        return seen;
      },
      [](engine_share const& /*seen*/, std::string const& /*failure*/) {});  // the next look tells
}

void engine_host::impl::watch_again() {
  auto next = next_watch_;
  {
    std::lock_guard const lock{mutex_};
    for (auto const& engine : engines_) {
      next = std::min(next, idle_end(engine).value_or(next));
      // One that becomes idle meanwhile is not looked at later than that.
      if (auto const timeout = idle_timeout_of(engine)) {
        next = std::min(
            next, clock::now() + std::max(std::chrono::duration_cast<clock::duration>(*timeout),
                                          clock::duration{while_going}));
      }
    }
  }
  watching_.expires_at(next);
  watching_.async_wait([this](error_code cancelled) {
    if (!cancelled) watch();
  });
}

void engine_host::impl::park_idle() {
  std::vector<std::size_t> idle;
  {
    std::lock_guard const lock{mutex_};
    auto const now = clock::now();
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      if (auto const end = idle_end(engines_[i]); end && *end <= now) idle.push_back(i);
    }
  }
  for (auto const which : idle) park(which);
}

/// Under the mutex. Nothing says that an engine has Sluice's plugin but that it is in the pool.
void engine_host::impl::note_cache(entry& engine, engine_share const& seen) {
  bool const lacks = engine.is.engine->kv == policy::engine_cache::pool && !seen.kv();
  if (!lacks) {
    engine.kv_fault.clear();
  } else if (engine.kv_fault.empty()) {
    engine.kv_fault = fmt::format(
        "its policy says kv: pool, and it has started without: vLLM loads Sluice's plugin if the "
        "package sluice is installed for its Python, and VLLM_PLUGINS does not leave "
        "it out; {} "
        "says more",
        log_of(engine).string());
    spdlog::warn("engine keeps its KV cache beside the pool engine={} reason={}", engine.is.name,
                 telemetry::quoted(engine.kv_fault));
  }
}

/// What nobody here has done: an operator, or a demand of the server's.
void engine_host::impl::on_seen(std::size_t which, engine_share const& seen) {
  bool is_taken = false, comes = false, lacks_memory = false, is_news = false;
  {
    std::lock_guard const lock{mutex_};
    auto& engine = engines_[which];
    engine.share = seen;
    engine.busy.add(seen.worked(), engine.counts.answered);
    (void)engine.controller.tick(clock::now());
    if (engine.state == engine_state::ready && seen.is_held()) {
      engine.state = engine_state::parked;
      engine.by_operator = true;
      engine.kept.drop();
    } else if (engine.state == engine_state::parked && !seen.is_held()) {
      engine.state = engine_state::waking;
      engine.by_operator = false;
      comes = true;
    }
    lacks_memory = seen.waits() &&
                   (engine.state == engine_state::ready || engine.state == engine_state::starting);
    engine.is_used = !engine.inside.empty() || !engine.waiting.empty();
    is_news = !seen.is_noted(engine.is_used);
    if (is_up(engine.state)) note_cache(engine, seen);
    is_taken = engine.state == engine_state::ready && engine.inside.empty() &&
               engine.waiting.empty() && !engine.is_shared && seen.parked_bytes() > 0;
  }
  if (comes) {
    engines_[which].now.parking_began = clock::now();
    look_whether_back(which);
  }
  if (is_news) say_use(which);
  if (lacks_memory) park_another_for(which);
  if (is_taken) park(which);  // so that it stays until somebody asks for it
}

// ---- going

/// Who has been idle for longest gives way to who waits for memory, before its timeout; one at a time.
void engine_host::impl::park_another_for(std::size_t which) {
  std::optional<std::size_t> longest;
  {
    std::lock_guard const lock{mutex_};
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      if (engines_[i].state == engine_state::parking) return;  // whose memory is on its way
      if (i == which || !idle_end(engines_[i])) continue;
      if (!longest || engines_[i].idle_since < engines_[*longest].idle_since) longest = i;
    }
  }
  if (longest) park(*longest);
}

void engine_host::impl::park(std::size_t which) {
  auto& engine = engines_[which];
  {
    std::lock_guard const lock{mutex_};
    bool const may_go = engine.state == engine_state::waking ||
                        (engine.state == engine_state::ready && engine.inside.empty());
    if (!engine.now.process || !may_go || is_draining_) return;
    engine.state = engine_state::parking;
    engine.kept.drop();
  }
  engine.now.question.reset();
  engine.now.unasked.clear();
  engine.now.parking_began = clock::now();
  order_away(which);
}

void engine_host::impl::order_away(std::size_t which) {
  ask_broker(
      which,
      [this](pid_t root) {
        auto const seen = pool_->look(root);
        pool_->park(seen);
        return seen;
      },
      [this, which](engine_share const& seen, std::string const& failure) {
        if (state_of(which) != engine_state::parking) return;
        if (!failure.empty()) return give_up_parking(which, failure);
        if (seen.members.empty()) {
          return give_up_parking(which, "none of its processes has memory of the pool");
        }
        look_whether_away(which);
      });
}

void engine_host::impl::look_whether_away(std::size_t which) {
  ask_broker(
      which, [this](pid_t root) { return pool_->look(root); },
      [this, which](engine_share const& seen, std::string const& failure) {
        if (state_of(which) != engine_state::parking) return;
        if (failure.empty() && seen.awaits_order()) return order_away(which);
        if (failure.empty() && seen.is_away()) {
          {
            std::lock_guard const lock{mutex_};
            engines_[which].share = seen;
          }
          return on_away(which);
        }
        if (clock::now() - engines_[which].now.parking_began > going_patience) {
          return give_up_parking(which,
                                 failure.empty() ? "its device does not come to rest" : failure);
        }
        after(which, while_going, &impl::look_whether_away);
      });
}

void engine_host::impl::on_away(std::size_t which) {
  auto& engine = engines_[which];
  bool is_wanted = false;
  {
    std::lock_guard const lock{mutex_};
    engine.state = engine_state::parked;
    engine.park_refusal.clear();
    is_wanted = !engine.waiting.empty();
  }
  spdlog::info("engine is parked engine={} parked_bytes={} resident_bytes={} took_ms={:.0f}",
               engine.is.name, engine.share->parked_bytes(), engine.share->resident_bytes(),
               milliseconds_of(clock::now() - engine.now.parking_began));
  if (is_wanted) wake(which);
}

/// All is as before, and it is tried again when it has been idle for as long once more.
void engine_host::impl::give_up_parking(std::size_t which, std::string const& why) {
  auto& engine = engines_[which];
  {
    std::lock_guard const lock{mutex_};
    engine.park_refusal = why;
  }
  if (std::exchange(engine.now.park_refusal_logged, why) != why) {
    spdlog::warn("engine is not parked engine={} reason={}", engine.is.name,
                 telemetry::quoted(why));
  }
  wake(which);  // those of its processes that have gone
}

// ---- coming

void engine_host::impl::wake(std::size_t which) {
  auto& engine = engines_[which];
  {
    std::lock_guard const lock{mutex_};
    bool const is_away =
        engine.state == engine_state::parking || engine.state == engine_state::parked;
    if (!engine.now.process || !is_away || engine.by_operator) return;
    engine.state = engine_state::waking;
  }
  engine.now.parking_timer->cancel();
  engine.now.parking_began = clock::now();
  ask_broker(
      which,
      [this](pid_t root) {
        auto const seen = pool_->look(root);
        pool_->wake(seen);
        return seen;
      },
      [this, which](engine_share const& /*seen*/, std::string const& failure) {
        if (!failure.empty()) {
          spdlog::warn("engine cannot be woken yet engine={} reason={}", engines_[which].is.name,
                       telemetry::quoted(failure));
        }
        if (state_of(which) == engine_state::waking) look_whether_back(which);
      });
}

void engine_host::impl::look_whether_back(std::size_t which) {
  ask_broker(
      which,
      [this](pid_t root) {
        auto seen = pool_->look(root);
        pool_->wake(seen);  // what has been taken in between, too
        return seen;
      },
      [this, which](engine_share const& seen, std::string const& failure) {
        if (state_of(which) != engine_state::waking) return;
        if (failure.empty() && seen.is_back()) {
          {
            std::lock_guard const lock{mutex_};
            engines_[which].share = seen;
          }
          return on_back(which);
        }
        auto const waited = clock::now() - engines_[which].now.parking_began;
        if (waited > share_of_timeout * how_.request_timeout) {
          return give_up_waking(which, seen);
        }
        if (waited > others_first) park_another_for(which);
        after(which, while_coming, &impl::look_whether_back);
      });
}

void engine_host::impl::on_back(std::size_t which) {
  auto& engine = engines_[which];
  calls admitted;
  clock::duration took{};
  std::function<void()> announce;
  {
    std::lock_guard const lock{mutex_};
    auto const now = clock::now();
    took = now - engine.now.parking_began;
    engine.state = engine_state::ready;
    engine.idle_since = now;
    if (engine.park_refusal.empty()) {
      engine.last_wake = took;
      engine.controller.on_load(now, took);
    }
    admitted = admit(engine);
    if (!admitted.empty()) announce = announce_;
  }
  if (announce) announce();
  if (engine.park_refusal.empty()) {
    spdlog::info("engine is back engine={} took_ms={:.0f}", engine.is.name, milliseconds_of(took));
  }
  for (auto const& each : admitted) each();
  if (!engine.now.has_asked) ask_for_models(which);
}

/// Who waits hears why, and it stays away: in part it would hold memory that others could use.
void engine_host::impl::give_up_waking(std::size_t which, engine_share const& seen) {
  auto& engine = engines_[which];
  auto const why = fmt::format(
      "engine '{}' is parked, and the pool has had no {} for it to come back within {:.3g} s: {}",
      engine.is.name, format_bytes(seen.parked_bytes()),
      std::chrono::duration<double>{clock::now() - engine.now.parking_began}.count(),
      seen.pool_text);
  spdlog::warn("engine does not come back engine={} reason={}", engine.is.name,
               telemetry::quoted(why));
  refuse_waiting(which, {error_kind::unavailable, why, try_again_after});
  park(which);
}

}  // namespace sluice::server
