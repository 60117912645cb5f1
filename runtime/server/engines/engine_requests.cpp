#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/engines/detail/engine_host_impl.hpp"

namespace sluice::server {

using nlohmann::json;
using namespace std::chrono_literals;
using std::chrono::milliseconds;

namespace {

json describe_times(token_distribution const& of) {
  return {{"counts", of.counts}, {"sum_s", scheduler::seconds{of.total}.count()}};
}

}  // namespace

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
  if (pool_ && engine.is_tenant() && !std::exchange(engine.is_used, true)) {
    net::post(io_, [this, which] { say_use(which); });
  }
  if (has_room(engine)) {
    auto const announce =
        pool_ && engine.is_tenant() && engine.inside.empty() ? announce_ : nullptr;
    engine.inside.emplace(ticket, admitted);
    auto address = engine.address;
    lock.unlock();
    if (announce) announce();
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

/// Under the mutex. Whose request it is that is inside.
engine_host::impl::entry* engine_host::impl::holder_of(engine_ticket ticket) {
  auto const found = std::find_if(engines_.begin(), engines_.end(),
                                  [&](entry const& each) { return each.inside.count(ticket) > 0; });
  return found == engines_.end() ? nullptr : &*found;
}

engine_connection engine_host::impl::reuse(engine_ticket ticket) {
  std::lock_guard const lock{mutex_};
  auto* const engine = holder_of(ticket);
  return engine == nullptr ? engine_connection{} : engine->kept.take(clock::now());
}

void engine_host::impl::keep(engine_ticket ticket, engine_connection connection) {
  std::lock_guard const lock{mutex_};
  auto* const engine = holder_of(ticket);
  if (engine == nullptr || is_draining_) return;
  engine->kept.keep(std::move(connection), clock::now());
  if (engine->kept.size() > 0 && !std::exchange(closes_kept_, true)) {
    net::post(io_, [this] { close_kept(); });
  }
}

/// Again and again while there are any.
void engine_host::impl::close_kept() {
  std::lock_guard const lock{mutex_};
  std::optional<clock::time_point> next;
  auto const now = clock::now();
  for (auto& engine : engines_) {
    engine.kept.close_old(now);
    if (auto const end = engine.kept.next_end()) next = std::min(next.value_or(*end), *end);
  }
  closes_kept_ = next && !is_draining_;
  if (!closes_kept_) return;
  closing_.expires_at(*next);
  closing_.async_wait([this](boost::system::error_code cancelled) {
    if (!cancelled) close_kept();
  });
}

void engine_host::impl::note_tokens(engine_ticket ticket, token_times const& came) {
  std::lock_guard const lock{mutex_};
  if (auto* const engine = holder_of(ticket)) engine->tokens.add(clock::now(), came);
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
      engine.counts.broken_off += report.is_broken_off ? 1 : 0;
      if (was_inside && report.outcome != relay_outcome::client_left) {
        engine.in_time.add(clock::now(),
                           report.until_answer && *report.until_answer <= engine.is.slo.latency);
      }
      note_for_scheduler(engine, report);
      if (engine.inside.empty()) engine.idle_since = clock::now();
      if (is_draining_) net::post(io_, [this, i] { release_if_done(i); });
      admissions = admit(engine);
      break;
    }
  }
  for (auto const& each : admissions) each();
}

/// Of a process that has been started anew the time begins with zero.
void engine_host::impl::busy_time::add(scheduler::seconds worked, std::uint64_t answered) {
  constexpr double fading = 8;
  if (answered > answered_ && worked > worked_) {
    auto const each = (worked - worked_) / static_cast<double>(answered - answered_);
    mean_ = mean_ ? *mean_ + (each - *mean_) / fading : each;
  }
  if (answered > answered_ || worked < worked_) {
    worked_ = worked;
    answered_ = answered;
  }
}

/// Under the mutex. Where the pool does not say how long a device works for a request, how long it waited for a place is not told
/// apart from how long it was served.
void engine_host::impl::note_for_scheduler(entry& engine, relay_report const& report) {
  if (report.until_answer) {
    scheduler::seconds const until_answer = *report.until_answer;
    engine.controller.on_service(clock::now(), engine.busy.of_request().value_or(until_answer),
                                 until_answer);
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
  if (!may_enter(engine)) return shutting_down();
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
            {"broken_off", engine.counts.broken_off},
            {"client_left", engine.counts.client_left},
            {"adopted", engine.is_adopted},
            {"starts", engine.starts},
            {"ends", engine.ends},
            {"last_start_ms", nullptr},
            {"observed_attainment", nullptr},
            {"memory", engine.is.engine->memory == policy::engine_memory::pool ? "pool" : "own"},
            {"kv", nullptr},
            {"kv_bytes", nullptr},
            {"kv_used_bytes", nullptr},
            {"why_kv_fixed", engine.kv_fault},
            {"resident_bytes", nullptr},
            {"parked_bytes", nullptr},
            {"parks", engine.parks_before + (engine.share ? engine.share->parks() : 0)},
            {"last_wake_ms", nullptr},
            {"busy_ms", nullptr},
            {"busy_ms_of_request", nullptr},
            {"idle_timeout_s", nullptr},
            {"why_not_parked", engine.park_refusal}};
  if (engine.share) {
    made["resident_bytes"] = engine.share->resident_bytes();
    made["parked_bytes"] = engine.share->parked_bytes();
    made["busy_ms"] = engine.share->worked().count() / 1e3;
    if (auto const cache = engine.share->kv()) {
      made["kv"] = "elastic";
      made["kv_bytes"] = cache->bytes;
      made["kv_used_bytes"] = cache->used_bytes;
    }
  }
  if (!engine.kv_fault.empty()) made["kv"] = "fixed";
  if (auto const each = engine.busy.of_request()) made["busy_ms_of_request"] = each->count() * 1e3;
  if (engine.last_wake) made["last_wake_ms"] = milliseconds_of(*engine.last_wake);
  if (auto const timeout = idle_timeout_of(engine)) made["idle_timeout_s"] = timeout->count();
  if (engine.last_start) made["last_start_ms"] = milliseconds_of(*engine.last_start);
  if (auto const share = engine.in_time.read(clock::now()).share()) {
    made["observed_attainment"] = *share;
  }
  if (engine.is.engine->api == policy::engine_api::openai) {
    made["ttft"] = describe_times(engine.tokens.first());
    made["tbt"] = describe_times(engine.tokens.gaps());
    auto const share_or_null = [](std::optional<double> share) {
      return share ? json(*share) : json(nullptr);
    };
    made["observed_ttft_attainment"] = share_or_null(engine.tokens.first_in_time(clock::now()));
    made["observed_tbt_attainment"] = share_or_null(engine.tokens.gaps_in_time(clock::now()));
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

/// Under the mutex. What has been accepted by then may still use what is left to a successor.
bool engine_host::impl::may_enter(entry const& engine) const {
  return !is_draining_ || (is_leaving_ && engine.pid != 0);
}

bool engine_host::impl::is_draining() const {
  std::lock_guard const lock{mutex_};
  return is_draining_;
}

}  // namespace sluice::server
