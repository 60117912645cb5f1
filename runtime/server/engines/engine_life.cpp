#include <fmt/chrono.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <cstdlib>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/launcher/environment.hpp"
#include "runtime/server/engines/detail/engine_host_impl.hpp"
#include "runtime/server/engines/readiness_probe.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using error_code = boost::system::error_code;
using namespace std::chrono_literals;
using std::chrono::milliseconds;

constexpr milliseconds first_delay{100}, longest_delay{30'000};
/// An engine that has been ready for so long has not failed to start.
constexpr std::chrono::seconds long_enough{10};
/// Between two looks whether it is ready: the first, and the longest.
constexpr milliseconds first_look{20}, longest_look{500};

/// In a folder of its own, which its keeper removes with it.
std::string new_socket(std::filesystem::path const& runtime_folder) {
  auto made = (runtime_folder / "engines-XXXXXX").string();
  if (::mkdtemp(made.data()) == nullptr) {
    throw error{error_kind::unavailable,
                fmt::format("no folder for the sockets of engines can be made in {}",
                            runtime_folder.string())};
  }
  return made + "/engine.sock";
}

}  // namespace

milliseconds restart_delay(unsigned in_a_row) noexcept {
  auto delay = first_delay;
  for (unsigned i = 1; i < in_a_row && delay < longest_delay; ++i) {
    delay *= 2;
  }
  return std::min(delay, longest_delay);
}

/// Has it started, in its turn and not before its pause has passed.
void engine_host::impl::want(std::size_t which) {
  auto& engine = engines_[which];
  clock::time_point due;
  {
    std::lock_guard const lock{mutex_};
    bool const is_idle = engine.state == engine_state::cold || engine.state == engine_state::failed;
    if (is_draining_ || !is_idle) return;
    due = engine.next_start;
    // Until then requests hear why it has failed, if it has.
    if (engine.state == engine_state::cold) engine.state = engine_state::queued;
  }
  if (waits_for_retired(which)) return;  // whose end has it started
  engine.now.timer->expires_at(due);
  engine.now.timer->async_wait([this, which](error_code cancelled) {
    if (!cancelled) queue(which);
  });
}

void engine_host::impl::queue(std::size_t which) {
  if (engines_[which].now.process || waits_for_retired(which)) return;  // come meanwhile
  {
    std::lock_guard const lock{mutex_};
    engines_[which].state = engine_state::queued;
  }
  turns_.push_back(which);
  next_turn();
}

void engine_host::impl::next_turn() {
  if (!may_start_ || is_ending_ || starting_ || turns_.empty() || is_draining()) return;
  starting_ = turns_.front();
  turns_.pop_front();
  begin(*starting_);
}

void engine_host::impl::begin(std::size_t which) {
  auto& engine = engines_[which];
  engine_address address;
  try {
    auto const& is = *engine.is.engine;
    if (is.names(policy::socket_placeholder)) {
      address.socket = new_socket(how_.runtime_folder);
    } else {
      address.port = free_port();
    }
    engine.now.process = std::make_unique<engine_process>(order_of(engine, address));
    engine.now.began = clock::now();
    engine.now.next_look = first_look;
    engine.now.why_not = "it has not been asked yet";
    {
      std::lock_guard const lock{mutex_};
      engine.state = engine_state::starting;
      engine.address = address;
      engine.is_adopted = engine.is_shared = false;
      ++engine.starts;
    }
    spdlog::info("engine starts engine={} address={}", engine.is.name,
                 telemetry::quoted(text_of(address)));
    listen(which);
    look(which);
  } catch (std::exception const& failure) {
    std::error_code ignored;
    if (!engine.now.process && !address.socket.empty()) {
      std::filesystem::remove(std::filesystem::path{address.socket}.parent_path(), ignored);
    }
    on_end(which, failure.what());
  }
}

engine_order engine_host::impl::order_of(entry const& engine, engine_address const& address) const {
  auto const& is = *engine.is.engine;
  engine_order order;
  order.keeper = how_.keeper;
  order.name = engine.is.name;
  for (auto const& word : is.command) order.command.push_back(with_address(word, address));
  launcher::environment variables{how_.environment};
  for (auto const& [name, value] : is.env) variables.set(name, with_address(value, address));
  if (address.socket.empty()) variables.set("PORT", std::to_string(address.port));
  if (pool_ && engine.is_tenant()) {
    variables = pool_->environment_of(engine.is, std::move(variables));
  }
  order.environment = variables.entries();
  order.folder = how_.folder;
  order.log = log_of(engine);
  order.meeting = new_meeting_place(how_.runtime_folder, how_.device);
  order.identity = identity_of(engine);
  order.address = address;
  order.patience = how_.patience;
  return order;
}

/// To its keeper.
void engine_host::impl::listen(std::size_t which) {
  auto& now = engines_[which].now;
  auto own = memhandover::duplicate(now.process->socket());
  if (!own) throw error{error_kind::unavailable, "this process may open no more files"};
  now.socket = std::make_unique<net::posix::stream_descriptor>(io_, own.release());
  await_word(which);
}

void engine_host::impl::await_word(std::size_t which) {
  engines_[which].now.socket->async_wait(net::posix::stream_descriptor::wait_read,
                                         [this, which](error_code failure) {
                                           if (!failure) hear(which);
                                         });
}

void engine_host::impl::hear(std::size_t which) {
  auto& engine = engines_[which];
  while (auto const said = engine.now.process->hear()) {
    auto const type = said->value("type", "");
    if (type == "ended" && is_awaited(which)) return on_lost(which);
    if (type == "ended") return on_end(which, said->value("text", "has ended"));
    if (type == "yours") on_yours(which, *said);
    std::lock_guard const lock{mutex_};
    if (type == "started") engine.pid = said->value("pid", 0);
    if (type == "alone") engine.is_shared = false;
  }
  await_word(which);
}

void engine_host::impl::look(std::size_t which) {
  auto& engine = engines_[which];
  if (!engine.now.process) return;
  if (clock::now() - engine.now.began > engine.is.engine->start_timeout) {
    return on_end(which, fmt::format("was not ready within {} (start_timeout): {}",
                                     std::chrono::duration<double>{engine.is.engine->start_timeout},
                                     engine.now.why_not));
  }
  engine.now.look =
      look_whether_ready(io_.get_executor(), address_of(engine), engine.is.engine->ready,
                         [this, which](std::string const& why_not) { on_look(which, why_not); });
}

/// Of the look that calls, which is not to be destroyed within its own call.
void engine_host::impl::end_look(entry& engine) {
  net::post(io_, [look = std::exchange(engine.now.look, nullptr)] {});
}

engine_address engine_host::impl::address_of(entry const& engine) const {
  std::lock_guard const lock{mutex_};
  return engine.address;
}

void engine_host::impl::on_look(std::size_t which, std::string const& why_not) {
  auto& engine = engines_[which];
  if (why_not.empty()) return on_ready(which);
  end_look(engine);
  engine.now.why_not = why_not;
  engine.now.timer->expires_after(engine.now.next_look);
  engine.now.next_look = std::min(engine.now.next_look * 2, longest_look);
  engine.now.timer->async_wait([this, which](error_code cancelled) {
    if (!cancelled) look(which);
  });
}

void engine_host::impl::on_ready(std::size_t which) {
  auto& engine = engines_[which];
  end_look(engine);
  std::vector<std::function<void()>> admissions;
  clock::duration took{};
  {
    std::lock_guard const lock{mutex_};
    engine.state = engine_state::ready;
    engine.ready_since = engine.idle_since = clock::now();
    took = engine.ready_since - engine.now.began;
    if (!engine.is_adopted) engine.last_start = took;
    engine.has_failed_to_start = false;
    admissions = admit(engine);
  }
  spdlog::info("engine is ready engine={} took_ms={:.0f}", engine.is.name, milliseconds_of(took));
  for (auto const& each : admissions) each();
  ask_for_models(which);
  end_turn(which);
}

/// Of one that was ready, and has not been reached: it has ended, which is heard soon, or it is as before.
void engine_host::impl::check(std::size_t which) {
  auto& engine = engines_[which];
  {
    std::lock_guard const lock{mutex_};
    // It may have ended meanwhile, with nobody waiting for it then.
    if (!engine.waiting.empty()) {
      net::post(io_, [this, which] { want(which); });
    }
    if (!engine.is_doubted || is_ending_) return;
  }
  if (engine.now.look) return;  // already
  engine.now.look =
      look_whether_ready(io_.get_executor(), address_of(engine), engine.is.engine->ready,
                         [this, which](std::string const& why_not) { on_check(which, why_not); });
}

void engine_host::impl::on_check(std::size_t which, std::string const& why_not) {
  auto& engine = engines_[which];
  end_look(engine);
  if (!why_not.empty()) {
    engine.now.timer->expires_after(longest_look);
    engine.now.timer->async_wait([this, which](error_code cancelled) {
      if (!cancelled) check(which);
    });
    return;
  }
  std::vector<std::function<void()>> admissions;
  {
    std::lock_guard const lock{mutex_};
    engine.is_doubted = false;
    admissions = admit(engine);
  }
  for (auto const& each : admissions) each();
}

void engine_host::impl::end_turn(std::size_t which) {
  if (starting_ != which) return;
  starting_.reset();
  next_turn();
}

/// The process has ended, or is ended now, or could not be started.
void engine_host::impl::on_end(std::size_t which, std::string const& how) {
  auto& engine = engines_[which];
  auto const said = engine.now.process ? engine.now.process->last_lines() : std::string{};
  drop_process(engine);
  engine.now.has_asked = false;
  bool has_started = false, goes_on = false;
  std::string reason;
  {
    std::lock_guard const lock{mutex_};
    auto const now = clock::now();
    has_started = is_up(engine.state);
    engine.parks_before += engine.share ? engine.share->parks() : 0;
    engine.share.reset();
    engine.kv_fault.clear();
    engine.by_operator = false;
    engine.is_doubted = engine.is_shared = false;
    engine.kept.drop();
    bool const was_up = has_started && now - engine.ready_since >= long_enough;
    engine.failures = was_up ? 1 : engine.failures + 1;
    engine.next_start = now + restart_delay(engine.failures);
    engine.reason = fmt::format("it {}{}{}", how, said.empty() ? "" : "; it said last: ", said);
    engine.state = has_started ? engine_state::cold : engine_state::failed;
    engine.pid = 0;
    ++engine.ends;
    reason = has_started ? engine.reason : cannot_start(engine);
    goes_on = !is_draining_ && (engine.is.engine->start == policy::engine_start::at_boot ||
                                (has_started && !engine.waiting.empty()));
  }
  if (is_ending_) {
    spdlog::info("engine has ended engine={} how={}", engine.is.name, telemetry::quoted(how));
    return look_whether_all_ended();
  }
  spdlog::error("engine has ended engine={} reason={}", engine.is.name, telemetry::quoted(reason));
  if (!has_started || is_draining()) {
    refuse_waiting(which, {error_kind::unavailable, reason, restart_delay(engine.failures)});
  }
  if (goes_on) want(which);
  end_turn(which);
}

/// It is its predecessor's still.
bool engine_host::impl::is_awaited(std::size_t which) const {
  auto const& process = engines_[which].now.process;
  return process && !process->is_own() && !is_draining();
}

void engine_host::impl::look_whether_all_ended() {
  bool const has_any = std::any_of(engines_.begin(), engines_.end(),
                                   [](auto const& each) { return each.now.process != nullptr; });
  if (!has_any && all_ended_ != nullptr) std::exchange(all_ended_, nullptr)->set_value();
}

}  // namespace sluice::server
