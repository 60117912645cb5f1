#include <fmt/format.h>

#include <boost/asio/post.hpp>

#include "memhandover/base/error.hpp"
#include "runtime/server/engines/detail/engine_host_impl.hpp"

namespace sluice::server {

using nlohmann::json;
using namespace std::chrono_literals;
using std::chrono::milliseconds;

engine_ticket engine_host::impl::enter(std::size_t which,
                                       std::function<void(engine_admission)> admitted) {
  std::unique_lock lock{mutex_};
  auto& engine = engines_[which];
  if (auto refusal = refusal_of(engine)) {
    ++engine.counts.refused;
    lock.unlock();
    admitted(std::move(*refusal));
    return 0;
  }
  (void)engine.controller.on_arrival(clock::now());
  auto const ticket = ++last_ticket_;
  if (has_room(engine)) {
    engine.inside.emplace(ticket, admitted);
    auto address = engine.address;
    lock.unlock();
    admitted(std::move(address));
    return ticket;
  }
  engine.waiting.emplace(ticket, std::move(admitted));
  auto const state = engine.state;
  lock.unlock();
  if (state == engine_state::cold || state == engine_state::failed) {
    net::post(io_, [this, which] { want(which); });
  } else if (state == engine_state::parking || state == engine_state::parked) {
    net::post(io_, [this, which] { wake(which); });
  }
  return ticket;
}

void engine_host::impl::send_back(engine_ticket ticket) {
  std::lock_guard const lock{mutex_};
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    auto& engine = engines_[i];
    auto found = engine.inside.extract(ticket);
    if (found.empty()) continue;
    engine.waiting.insert(std::move(found));
    doubt(i);
  }
}

void engine_host::impl::leave(engine_ticket ticket, relay_report const& report) {
  std::vector<std::function<void()>> admissions;
  {
    std::lock_guard const lock{mutex_};
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      auto& engine = engines_[i];
      bool const was_inside = engine.inside.erase(ticket) > 0;
      if (!was_inside && engine.waiting.erase(ticket) == 0) continue;
      if (report.engine_has_left) doubt(i);
      engine.counts.add(report.outcome);
      if (was_inside && report.outcome != relay_outcome::client_left) {
        engine.in_time.add(clock::now(),
                           report.until_answer && *report.until_answer <= engine.is.slo.latency);
      }
      note_for_scheduler(engine, report);
      if (engine.inside.empty()) engine.idle_since = clock::now();
      admissions = admit(engine);
      break;
    }
  }
  for (auto const& each : admissions) each();
}

/// Under the mutex. How long it waited for a place is not told apart from how long it was served.
void engine_host::impl::note_for_scheduler(entry& engine, relay_report const& report) {
  if (report.until_answer) {
    engine.controller.on_service(clock::now(), *report.until_answer, *report.until_answer);
  } else if (report.outcome != relay_outcome::client_left) {
    engine.controller.on_failure(clock::now());
  }
}

/// One whose memory is away can be asked as it could before.
readiness engine_host::impl::ready(std::size_t which) const {
  std::lock_guard const lock{mutex_};
  auto const& engine = engines_[which];
  if (is_up(engine.state)) return {};
  auto state = std::string{to_string(engine.state)};
  if (engine.state == engine_state::cold) state += "; a request to one of its routes starts it";
  return {false, engine.reason.empty() ? state : fmt::format("{}: {}", state, engine.reason)};
}

std::vector<std::string> engine_host::impl::faults() const {
  std::lock_guard const lock{mutex_};
  std::vector<std::string> found;
  for (auto const& engine : engines_) {
    bool const is_due = engine.is.engine->start == policy::engine_start::at_boot;
    if (engine.state == engine_state::failed || (is_due && !is_up(engine.state))) {
      found.push_back(fmt::format("engine '{}' is {}{}{}", engine.is.name, to_string(engine.state),
                                  engine.reason.empty() ? "" : ": ", engine.reason));
    }
  }
  return found;
}

json engine_host::impl::status() {
  std::lock_guard const lock{mutex_};
  auto list = json::array();
  for (auto& engine : engines_) list.push_back(describe(engine));
  return list;
}

/// Under the mutex.
std::optional<error> engine_host::impl::refusal_of(entry const& engine) const {
  auto const& name = engine.is.name;
  if (is_draining_) return shutting_down();
  if (engine.state == engine_state::parked && engine.by_operator) {
    return error{
        error_kind::unavailable,
        fmt::format("engine '{}' is parked by an operator; `sluice wake` of the pid {} lets "
                    "it come back",
                    name, engine.pid)};
  }
  auto const pause = engine.next_start - clock::now();
  if (engine.state == engine_state::failed && pause > 0s) {
    return error{error_kind::unavailable, cannot_start(engine),
                 std::chrono::ceil<milliseconds>(pause)};
  }
  if (!has_room(engine) && engine.waiting.size() >= engine.is.max_queue) {
    return error{error_kind::unavailable,
                 fmt::format("{} requests wait for engine '{}' already (max_queue); try again "
                             "later",
                             engine.waiting.size(), name)};
  }
  return std::nullopt;
}

bool engine_host::impl::has_room(entry const& engine) {
  return engine.state == engine_state::ready && !engine.is_doubted &&
         engine.inside.size() < engine.is.engine->max_requests;
}

std::string engine_host::impl::cannot_start(entry const& engine) {
  return fmt::format("engine '{}' cannot be started: {}", engine.is.name, engine.reason);
}

/// Under the mutex; what is returned is to be called without it.
engine_host::impl::calls engine_host::impl::admit(entry& engine) {
  std::vector<std::function<void()>> made;
  while (has_room(engine) && !engine.waiting.empty()) {
    auto first = engine.waiting.extract(engine.waiting.begin());
    made.emplace_back([admitted = first.mapped(), address = engine.address] { admitted(address); });
    engine.inside.insert(std::move(first));
  }
  return made;
}

/// Nobody else is sent there until it has been looked at. Under the mutex.
void engine_host::impl::doubt(std::size_t which) {
  engines_[which].is_doubted = engines_[which].state == engine_state::ready;
  net::post(io_, [this, which] { check(which); });
}

void engine_host::impl::refuse_waiting(std::size_t which, error const& why) {
  std::map<engine_ticket, std::function<void(engine_admission)>> refused;
  {
    std::lock_guard const lock{mutex_};
    refused = std::exchange(engines_[which].waiting, {});
    engines_[which].counts.refused += refused.size();
  }
  for (auto const& [ticket, admitted] : refused) {
    admitted(error{why.kind(), why.what(), why.retry_after()});  // no text that threads share
  }
}

/// Under the mutex.
json engine_host::impl::describe(entry& engine) const {
  json made{{"name", engine.is.name},
            {"state", to_string(engine.state)},
            {"reason", engine.reason},
            {"pid", engine.pid},
            {"address", engine.pid == 0 ? "" : text_of(engine.address)},
            {"log", log_of(engine).string()},
            {"in_flight", engine.inside.size()},
            {"waiting", engine.waiting.size()},
            {"answered", engine.counts.answered},
            {"refused", engine.counts.refused},
            {"failed", engine.counts.failed},
            {"client_left", engine.counts.client_left},
            {"starts", engine.starts},
            {"ends", engine.ends},
            {"last_start_ms", nullptr},
            {"observed_attainment", nullptr},
            {"memory", engine.is_tenant() ? "pool" : "own"},
            {"resident_bytes", nullptr},
            {"parked_bytes", nullptr},
            {"parks", engine.parks_before + (engine.share ? engine.share->parks() : 0)},
            {"last_wake_ms", nullptr},
            {"idle_timeout_s", nullptr},
            {"why_not_parked", engine.park_refusal}};
  if (engine.share) {
    made["resident_bytes"] = engine.share->resident_bytes();
    made["parked_bytes"] = engine.share->parked_bytes();
  }
  if (engine.last_wake) made["last_wake_ms"] = milliseconds_of(*engine.last_wake);
  if (auto const timeout = idle_timeout_of(engine)) made["idle_timeout_s"] = timeout->count();
  if (engine.last_start) made["last_start_ms"] = milliseconds_of(*engine.last_start);
  if (auto const share = engine.in_time.read(clock::now()).share()) {
    made["observed_attainment"] = *share;
  }
  return made;
}

std::filesystem::path engine_host::impl::log_of(entry const& engine) const {
  return how_.runtime_folder / fmt::format("engine-{}.log", engine.is.name);
}

/// Under the mutex. Nothing: it is never parked for being idle.
std::optional<scheduler::seconds> engine_host::impl::idle_timeout_of(entry const& engine) const {
  constexpr std::chrono::hours longest{24};  // beyond it an instant could not be said
  auto const timeout = engine.controller.idle_timeout();
  if (!pool_ || !engine.is_tenant() || engine.is.warm.mode == policy::warm_mode::always ||
      timeout > longest) {
    return std::nullopt;
  }
  return timeout;
}

bool engine_host::impl::is_draining() const {
  std::lock_guard const lock{mutex_};
  return is_draining_;
}

}  // namespace sluice::server
