#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/engines/detail/engine_host_impl.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using error_code = boost::system::error_code;
using nlohmann::json;
using std::chrono::milliseconds;

/// Of one that is not wanted any more, from SIGTERM on.
constexpr std::chrono::seconds grace_of_retired{2};
/// The broker may be replaced just now.
constexpr milliseconds ask_again_after{100};
constexpr milliseconds first_probe{20};

}  // namespace

// ---- from a predecessor

std::size_t engine_host::impl::meet() {
  for (auto const& place : meeting_places(how_.runtime_folder, how_.device)) {
    if (auto met = engine_process::meet(place)) met_.push_back(std::move(met));
  }
  return met_.size();
}

void engine_host::impl::adopt() {
  net::post(io_, [this, met = std::exchange(met_, {})]() mutable {
    for (auto& each : met) {
      each->adopt();
      auto const place = place_for(*each);
      place ? await(*place, std::move(each)) : retire(std::move(each));
    }
  });
}

std::size_t engine_host::impl::adopted() const {
  std::lock_guard const lock{mutex_};
  return adopted_;
}

/// All that a process has of its policy.
json engine_host::impl::identity_of(entry const& engine) const {
  auto const& is = *engine.is.engine;
  return {{"name", engine.is.name},
          {"command", is.command},
          {"env", is.env},
          {"folder", how_.folder.string()},
          {"has_memory_of_the_pool", pool_ && engine.is_tenant()},
          {"may_be_parked", engine.is.warm.mode != policy::warm_mode::always}};
}

/// Nothing: none is wanted that is the same, or it is there already.
std::optional<std::size_t> engine_host::impl::place_for(engine_process const& met) const {
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (!engines_[i].now.process && identity_of(engines_[i]) == met.identity()) return i;
  }
  return std::nullopt;
}

void engine_host::impl::await(std::size_t which, std::unique_ptr<engine_process> met) {
  auto& engine = engines_[which];
  engine.now.timer->cancel();
  std::erase(turns_, which);
  engine.now.process = std::move(met);
  {
    std::lock_guard const lock{mutex_};
    engine.state = engine_state::queued;
    engine.address = engine.now.process->address();
    engine.pid = engine.now.process->pid();
  }
  try {
    listen(which);
  } catch (std::exception const& failure) {
    spdlog::warn("engine cannot be taken over engine={} reason={}", engine.is.name,
                 telemetry::quoted(failure.what()));
    on_lost(which);
  }
}

/// It has ended before its turn, or there is nobody who would give it.
void engine_host::impl::on_lost(std::size_t which) {
  auto& engine = engines_[which];
  spdlog::info("engine of the server before this one has ended engine={}", engine.is.name);
  engine.now.socket.reset();
  engine.now.process.reset();
  {
    std::lock_guard const lock{mutex_};
    engine.pid = 0;
  }
  go_on_if_wanted(which);
}

void engine_host::impl::on_yours(std::size_t which, json const& said) {
  auto& engine = engines_[which];
  auto const notes = said.value("notes", json::object());
  engine.now.began = engine.now.parking_began = clock::now();
  engine.now.was_ready = notes.value("ready", false);
  engine.now.was_parked_by_operator = notes.value("by_operator", false);
  {
    std::lock_guard const lock{mutex_};
    engine.is_adopted = true;
    engine.is_shared = said.value("shared", false);
    ++adopted_;
  }
  spdlog::info("engine is taken over from the server before this one engine={} pid={}",
               engine.is.name, engine.now.process->pid());
  find_out(which);
}

/// Where its memory is: nothing reaches one that is parked.
void engine_host::impl::find_out(std::size_t which) {
  if (!pool_ || !engines_[which].is_tenant()) return go_on(which);
  ask_broker(
      which, [this](pid_t root) { return pool_->look(root); },
      [this, which](engine_share const& seen, std::string const& failure) {
        auto& engine = engines_[which];
        if (state_of(which) != engine_state::queued) return;
        if (!failure.empty()) return after(which, ask_again_after, &impl::find_out);
        bool is_wanted = false;
        {
          std::lock_guard const lock{mutex_};
          engine.share = seen;
          engine.ready_since = engine.idle_since = clock::now();
          if (seen.is_held()) {
            engine.state = seen.is_away() ? engine_state::parked : engine_state::parking;
            engine.by_operator = engine.now.was_parked_by_operator;
          } else if (seen.parked_bytes() > 0) {
            engine.state = engine_state::waking;
          }
          is_wanted = !engine.waiting.empty();
        }
        switch (state_of(which)) {
          case engine_state::parked:
            if (engine.now.was_parked_by_operator) {
              std::unique_lock lock{mutex_};
              auto const why = refusal_of(engine);
              lock.unlock();
              if (why) refuse_waiting(which, *why);
            } else if (is_wanted) {
              wake(which);
            }
            return;
          case engine_state::parking:
            return look_whether_away(which);
          case engine_state::waking:
            return look_whether_back(which);
          default:
            return go_on(which);
        }
      });
}

/// One that has its memory, if it has any.
void engine_host::impl::go_on(std::size_t which) {
  auto& engine = engines_[which];
  if (engine.now.was_ready) return on_ready(which);
  {
    std::lock_guard const lock{mutex_};
    engine.state = engine_state::starting;
  }
  engine.now.next_look = first_probe;
  engine.now.why_not = "it has not been asked yet";
  look(which);
}

/// Nothing has its place any more.
void engine_host::impl::go_on_if_wanted(std::size_t which) {
  auto& engine = engines_[which];
  bool is_wanted = false;
  {
    std::lock_guard const lock{mutex_};
    engine.state = engine_state::cold;
    is_wanted = engine.is.engine->start == policy::engine_start::at_boot || !engine.waiting.empty();
  }
  if (is_wanted) want(which);
}

// ---- of a predecessor, and not wanted

void engine_host::impl::retire(std::unique_ptr<engine_process> met) {
  auto const name = met->identity().value("name", "");
  spdlog::info("engine of the server before this one is not wanted as it is engine={} pid={}",
               telemetry::quoted(name), met->pid());
  auto made = std::make_shared<retired>();
  made->process = std::move(met);
  made->timer = std::make_unique<net::steady_timer>(io_);
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (engines_[i].is.name == name && !engines_[i].now.process) made->instead = i;
  }
  auto own = memhandover::duplicate(made->process->socket());
  if (!own) return;  // then it ends when it has been nobody's for long enough
  made->socket = std::make_unique<net::posix::stream_descriptor>(io_, own.release());
  retired_.push_back(made);
  await_retired(made);
}

void engine_host::impl::await_retired(std::shared_ptr<retired> const& of) {
  of->socket->async_wait(net::posix::stream_descriptor::wait_read,
                         [this, weak = std::weak_ptr{of}](error_code failure) {
                           auto const held = weak.lock();
                           if (held && !failure) hear_retired(held);
                         });
}

void engine_host::impl::hear_retired(std::shared_ptr<retired> const& of) {
  while (auto const said = of->process->hear()) {
    auto const type = said->value("type", "");
    if (type == "ended") return on_retired(of);
    if (type == "alone" || (type == "yours" && !said->value("shared", false))) end_retired(of);
  }
  await_retired(of);
}

void engine_host::impl::end_retired(std::shared_ptr<retired> const& of) {
  of->ends = true;
  of->process->stop();
  of->timer->expires_after(grace_of_retired);
  of->timer->async_wait([this, weak = std::weak_ptr{of}](error_code cancelled) {
    auto const held = weak.lock();
    if (held && !cancelled) on_retired(held);
  });
}

void engine_host::impl::on_retired(std::shared_ptr<retired> const& of) {
  auto const instead = of->instead;
  std::erase(retired_, of);
  of->socket.reset();
  of->process.reset();
  if (instead && !waits_for_retired(*instead)) go_on_if_wanted(*instead);
}

bool engine_host::impl::waits_for_retired(std::size_t which) const {
  return std::any_of(retired_.begin(), retired_.end(),
                     [which](auto const& each) { return each->instead == which; });
}

/// Those whom somebody uses still are the next server's to end, or nobody's.
void engine_host::impl::forget_retired() {
  for (auto const& each : std::exchange(retired_, {})) {
    if (!each->ends) each->process->leave(json::object());
  }
}

// ---- to a successor

void engine_host::impl::leave() {
  {
    std::lock_guard const lock{mutex_};
    is_draining_ = is_leaving_ = true;
    for (auto& each : engines_) each.kept.drop();
  }
  net::post(io_, [this] {
    for (std::size_t i = 0; i < engines_.size(); ++i) leave(i);
    forget_retired();
  });
}

void engine_host::impl::leave(std::size_t which) {
  auto& engine = engines_[which];
  if (!engine.now.process) return refuse_waiting(which, shutting_down());
  if (!engine.now.process->is_own()) {  // it has not come to this server yet
    engine.now.socket.reset();
    engine.now.process.reset();
    {
      std::lock_guard const lock{mutex_};
      engine.pid = 0;
    }
    return refuse_waiting(which, shutting_down());
  }
  json notes;
  {
    std::lock_guard const lock{mutex_};
    notes = {{"ready", is_up(engine.state)}, {"by_operator", engine.by_operator}};
  }
  engine.now.process->leave(notes);
  spdlog::info("engine is left to the next server engine={} pid={}", engine.is.name,
               engine.now.process->pid());
}

void engine_host::impl::release() {
  {
    std::lock_guard const lock{mutex_};
    is_leaving_ = false;
  }
  net::post(io_, [this] {
    gives_away_ = true;
    for (std::size_t i = 0; i < engines_.size(); ++i) release_if_done(i);
  });
}

void engine_host::impl::release_if_done(std::size_t which) {
  auto& engine = engines_[which];
  if (!gives_away_ || !engine.now.process || engine.now.process->is_own()) return;
  {
    std::lock_guard const lock{mutex_};
    if (!engine.inside.empty() || !engine.waiting.empty()) return;
  }
  drop_process(engine);
}

/// And all that is asked of it, or awaited.
void engine_host::impl::drop_process(entry& engine) {
  engine.now.timer->cancel();
  engine.now.parking_timer->cancel();
  engine.now.look.reset();
  engine.now.question.reset();
  engine.now.unasked.clear();
  engine.now.socket.reset();
  engine.now.process.reset();
}

std::size_t engine_host::impl::in_flight() const {
  std::lock_guard const lock{mutex_};
  std::size_t all = 0;
  for (auto const& each : engines_) all += each.inside.size() + each.waiting.size();
  return all;
}

/// At the server's end.
void engine_host::impl::end_in_order(std::size_t which) {
  auto& now = engines_[which].now;
  if (!now.process) return;
  if (now.process->is_own()) return now.process->stop();
  now.socket.reset();
  now.process.reset();
}

}  // namespace sluice::server
