#include "runtime/server/engines/engine_host.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "runtime/launcher/environment.hpp"
#include "runtime/server/engines/engine_process.hpp"
#include "runtime/server/engines/engine_routes.hpp"
#include "runtime/server/engines/engine_state.hpp"
#include "runtime/server/engines/readiness_probe.hpp"
#include "runtime/telemetry/logging.hpp"
#include "scheduler/estimators.hpp"

namespace sluice::server {
namespace {

namespace net = boost::asio;
using error_code = boost::system::error_code;
using clock = std::chrono::steady_clock;
using nlohmann::json;
using std::chrono::milliseconds;
using namespace std::chrono_literals;

constexpr milliseconds first_delay{100}, longest_delay{30'000};
/// An engine that has been ready for so long has not failed to start.
constexpr std::chrono::seconds long_enough{10};
/// Between two looks whether it is ready: the first, and the longest.
constexpr milliseconds first_look{20}, longest_look{500};

error shutting_down() {
  return {error_kind::unavailable, "the server is shutting down"};
}

double milliseconds_of(clock::duration value) {
  return std::chrono::duration<double, std::milli>{value}.count();
}

}  // namespace

milliseconds restart_delay(unsigned in_a_row) noexcept {
  auto delay = first_delay;
  for (unsigned i = 1; i < in_a_row && delay < longest_delay; ++i) {
    delay *= 2;
  }
  return std::min(delay, longest_delay);
}

class engine_host::impl {
  /// What the host's thread alone has of an engine.
  struct run {
    std::unique_ptr<engine_process> process;
    std::unique_ptr<net::posix::stream_descriptor> socket;  ///< its own descriptor of the same
    std::shared_ptr<void> look;
    std::unique_ptr<net::steady_timer> timer;
    milliseconds next_look = first_look;
    clock::time_point began{};
    std::string why_not;  ///< it is ready
  };

  struct entry {
    explicit entry(policy::model_policy of)
        : is(std::move(of)), in_time{is.slo.window, clock::now()} {}

    policy::model_policy is;
    run now{};  ///< of the thread
    // What follows is guarded by the mutex.
    engine_state state = engine_state::cold;
    engine_address address{};
    std::string reason{};  ///< why it is not ready, or why it ended last
    clock::time_point ready_since{}, next_start{};
    unsigned failures = 0;  ///< in a row
    bool has_failed_to_start = false;
    int pid = 0;
    std::map<engine_ticket, std::function<void(engine_admission)>> waiting{};
    std::map<engine_ticket, std::function<void(engine_admission)>> inside{};
    bool is_doubted = false;  ///< ready, but somebody has not reached it
    relay_counts counts{};
    std::uint64_t starts = 0, ends = 0;
    std::optional<clock::duration> last_start{};
    scheduler::attainment_window in_time;
  };

 public:
  explicit impl(options how) : how_(std::move(how)), socket_folder_(folder_for_sockets()) {
    for (auto& each : how_.engines) {
      for (auto const& route : each.engine->routes) {
        routes_.add(route, engines_.size());
      }
      engines_.emplace_back(std::move(each)).now.timer = std::make_unique<net::steady_timer>(io_);
    }
    thread_ = std::thread{[this] {
      ::pthread_setname_np(::pthread_self(), "sluice-engines");
      work();
    }};
  }
  impl(impl const&) = delete;
  impl& operator=(impl const&) = delete;
  impl(impl&&) = delete;
  impl& operator=(impl&&) = delete;
  ~impl() {
    stop(milliseconds{0});
    std::error_code ignored;
    std::filesystem::remove_all(socket_folder_, ignored);
  }

  void start() {
    net::post(io_, [this] {
      for (std::size_t i = 0; i < engines_.size(); ++i) {
        if (engines_[i].is.engine->start == policy::engine_start::at_boot) want(i);
      }
    });
  }

  void drain() {
    {
      std::lock_guard const lock{mutex_};
      is_draining_ = true;
    }
    net::post(io_, [this] {  // no other one begins to start
      for (std::size_t i = 0; i < engines_.size(); ++i) {
        if (!engines_[i].now.process) refuse_waiting(i, shutting_down());
      }
    });
  }

  void stop(milliseconds grace) {
    if (!thread_.joinable()) return;
    drain();
    std::promise<void> ended;
    net::post(io_, [&] {
      all_ended_ = &ended;
      is_ending_ = true;
      for (std::size_t i = 0; i < engines_.size(); ++i) {
        engines_[i].now.timer->cancel();
        refuse_waiting(i, shutting_down());
        if (engines_[i].now.process) engines_[i].now.process->stop();
      }
      look_whether_all_ended();
    });
    (void)ended.get_future().wait_for(grace);
    net::post(io_, [this] {
      all_ended_ = nullptr;
      for (auto& each : engines_) {
        each.now.timer->cancel();
        each.now.look.reset();
        each.now.socket.reset();
        each.now.process.reset();
      }
      guard_.reset();
    });
    thread_.join();
  }

  [[nodiscard]] engine_routes const& routes() const { return routes_; }
  [[nodiscard]] policy::model_policy const& at(std::size_t engine) const {
    return engines_[engine].is;
  }
  [[nodiscard]] std::size_t size() const { return engines_.size(); }
  [[nodiscard]] std::chrono::microseconds request_timeout() const { return how_.request_timeout; }

  engine_ticket enter(std::size_t which, std::function<void(engine_admission)> admitted) {
    std::unique_lock lock{mutex_};
    auto& engine = engines_[which];
    if (auto refusal = refusal_of(engine)) {
      ++engine.counts.refused;
      lock.unlock();
      admitted(std::move(*refusal));
      return 0;
    }
    auto const ticket = ++last_ticket_;
    if (has_room(engine)) {
      engine.inside.emplace(ticket, admitted);
      auto address = engine.address;
      lock.unlock();
      admitted(std::move(address));
      return ticket;
    }
    engine.waiting.emplace(ticket, std::move(admitted));
    bool const is_wanted =
        engine.state == engine_state::cold || engine.state == engine_state::failed;
    lock.unlock();
    if (is_wanted) net::post(io_, [this, which] { want(which); });
    return ticket;
  }

  void send_back(engine_ticket ticket) {
    std::lock_guard const lock{mutex_};
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      auto& engine = engines_[i];
      auto found = engine.inside.extract(ticket);
      if (found.empty()) continue;
      engine.waiting.insert(std::move(found));
      doubt(i);
    }
  }

  void leave(engine_ticket ticket, relay_report const& report) {
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
        admissions = admit(engine);
        break;
      }
    }
    for (auto const& each : admissions) each();
  }

  [[nodiscard]] readiness ready(std::size_t which) const {
    std::lock_guard const lock{mutex_};
    auto const& engine = engines_[which];
    if (engine.state == engine_state::ready) return {};
    auto state = std::string{to_string(engine.state)};
    if (engine.state == engine_state::cold) state += "; a request to one of its routes starts it";
    return {false, engine.reason.empty() ? state : fmt::format("{}: {}", state, engine.reason)};
  }

  [[nodiscard]] std::vector<std::string> faults() const {
    std::lock_guard const lock{mutex_};
    std::vector<std::string> found;
    for (auto const& engine : engines_) {
      bool const is_due = engine.is.engine->start == policy::engine_start::at_boot;
      if (engine.state == engine_state::failed || (is_due && engine.state != engine_state::ready)) {
        found.push_back(fmt::format("engine '{}' is {}{}{}", engine.is.name,
                                    to_string(engine.state), engine.reason.empty() ? "" : ": ",
                                    engine.reason));
      }
    }
    return found;
  }

  [[nodiscard]] json status() {
    std::lock_guard const lock{mutex_};
    auto list = json::array();
    for (auto& engine : engines_) list.push_back(describe(engine));
    return list;
  }

 private:
  void work() {
    for (;;) {
      try {
        io_.run();
        return;
      } catch (std::exception const& failure) {
        spdlog::error("a step of the engines failed reason={}", telemetry::quoted(failure.what()));
      }
    }
  }

  [[nodiscard]] std::filesystem::path folder_for_sockets() const {
    if (std::none_of(how_.engines.begin(), how_.engines.end(), [](auto const& each) {
          return each.engine->names(policy::socket_placeholder);
        })) {
      return {};
    }
    auto made = (how_.runtime_folder / "engines-XXXXXX").string();
    if (::mkdtemp(made.data()) == nullptr) {
      throw error{error_kind::unavailable,
                  fmt::format("no folder for the sockets of engines can be made in {}",
                              how_.runtime_folder.string())};
    }
    return made;
  }

  // ---- requests

  /// Under the mutex.
  [[nodiscard]] std::optional<error> refusal_of(entry const& engine) const {
    auto const& name = engine.is.name;
    if (is_draining_) return shutting_down();
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

  [[nodiscard]] static bool has_room(entry const& engine) {
    return engine.state == engine_state::ready && !engine.is_doubted &&
           engine.inside.size() < engine.is.engine->max_requests;
  }

  [[nodiscard]] static std::string cannot_start(entry const& engine) {
    return fmt::format("engine '{}' cannot be started: {}", engine.is.name, engine.reason);
  }

  /// Under the mutex; what is returned is to be called without it.
  [[nodiscard]] static std::vector<std::function<void()>> admit(entry& engine) {
    std::vector<std::function<void()>> made;
    while (has_room(engine) && !engine.waiting.empty()) {
      auto first = engine.waiting.extract(engine.waiting.begin());
      made.emplace_back(
          [admitted = first.mapped(), address = engine.address] { admitted(address); });
      engine.inside.insert(std::move(first));
    }
    return made;
  }

  /// Nobody else is sent there until it has been looked at. Under the mutex.
  void doubt(std::size_t which) {
    engines_[which].is_doubted = engines_[which].state == engine_state::ready;
    net::post(io_, [this, which] { check(which); });
  }

  void refuse_waiting(std::size_t which, error const& why) {
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

  // ---- their life; on the thread alone

  /// Has it started, in its turn and not before its pause has passed.
  void want(std::size_t which) {
    auto& engine = engines_[which];
    clock::time_point due;
    {
      std::lock_guard const lock{mutex_};
      bool const is_idle =
          engine.state == engine_state::cold || engine.state == engine_state::failed;
      if (is_draining_ || !is_idle) return;
      due = engine.next_start;
      // Until then requests hear why it has failed, if it has.
      if (engine.state == engine_state::cold) engine.state = engine_state::queued;
    }
    engine.now.timer->expires_at(due);
    engine.now.timer->async_wait([this, which](error_code cancelled) {
      if (!cancelled) queue(which);
    });
  }

  void queue(std::size_t which) {
    {
      std::lock_guard const lock{mutex_};
      engines_[which].state = engine_state::queued;
    }
    turns_.push_back(which);
    next_turn();
  }

  void next_turn() {
    if (is_ending_ || starting_ || turns_.empty() || is_draining()) return;
    starting_ = turns_.front();
    turns_.pop_front();
    begin(*starting_);
  }

  [[nodiscard]] bool is_draining() const {
    std::lock_guard const lock{mutex_};
    return is_draining_;
  }

  void begin(std::size_t which) {
    auto& engine = engines_[which];
    try {
      engine_address address;
      auto const& is = *engine.is.engine;
      if (is.names(policy::socket_placeholder)) {
        address.socket = (socket_folder_ / (std::to_string(which) + ".sock")).string();
        std::error_code ignored;
        std::filesystem::remove(address.socket, ignored);
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
        ++engine.starts;
      }
      spdlog::info("engine starts engine={} address={}", engine.is.name,
                   telemetry::quoted(text_of(address)));
      listen(which);
      look(which);
    } catch (std::exception const& failure) {
      on_end(which, failure.what());
    }
  }

  [[nodiscard]] static std::string text_of(engine_address const& address) {
    return address.socket.empty() ? fmt::format("127.0.0.1:{}", address.port) : address.socket;
  }

  [[nodiscard]] engine_order order_of(entry const& engine, engine_address const& address) const {
    auto const& is = *engine.is.engine;
    engine_order order;
    order.keeper = how_.keeper;
    order.name = engine.is.name;
    for (auto const& word : is.command) order.command.push_back(with_address(word, address));
    launcher::environment variables{how_.environment};
    for (auto const& [name, value] : is.env) variables.set(name, with_address(value, address));
    if (address.socket.empty()) variables.set("PORT", std::to_string(address.port));
    order.environment = variables.entries();
    order.folder = how_.folder;
    order.log = log_of(engine);
    return order;
  }

  [[nodiscard]] std::filesystem::path log_of(entry const& engine) const {
    return how_.runtime_folder / fmt::format("engine-{}.log", engine.is.name);
  }

  /// To its keeper.
  void listen(std::size_t which) {
    auto& now = engines_[which].now;
    auto own = memhandover::duplicate(now.process->socket());
    if (!own) throw error{error_kind::unavailable, "this process may open no more files"};
    now.socket = std::make_unique<net::posix::stream_descriptor>(io_, own.release());
    await_word(which);
  }

  void await_word(std::size_t which) {
    engines_[which].now.socket->async_wait(net::posix::stream_descriptor::wait_read,
                                           [this, which](error_code failure) {
                                             if (!failure) hear(which);
                                           });
  }

  void hear(std::size_t which) {
    auto& engine = engines_[which];
    while (auto const said = engine.now.process->hear()) {
      if (said->value("type", "") == "ended")
        return on_end(which, said->value("text", "has ended"));
      if (said->value("type", "") == "started") {
        std::lock_guard const lock{mutex_};
        engine.pid = said->value("pid", 0);
      }
    }
    await_word(which);
  }

  void look(std::size_t which) {
    auto& engine = engines_[which];
    if (!engine.now.process) return;
    if (clock::now() - engine.now.began > engine.is.engine->start_timeout) {
      return on_end(which,
                    fmt::format("was not ready within {} (start_timeout): {}",
                                std::chrono::duration<double>{engine.is.engine->start_timeout},
                                engine.now.why_not));
    }
    engine.now.look =
        look_whether_ready(io_.get_executor(), address_of(engine), engine.is.engine->ready,
                           [this, which](std::string const& why_not) { on_look(which, why_not); });
  }

  /// Of the look that calls, which is not to be destroyed within its own call.
  void end_look(entry& engine) {
    net::post(io_, [look = std::exchange(engine.now.look, nullptr)] {});
  }

  [[nodiscard]] engine_address address_of(entry const& engine) const {
    std::lock_guard const lock{mutex_};
    return engine.address;
  }

  void on_look(std::size_t which, std::string const& why_not) {
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

  void on_ready(std::size_t which) {
    auto& engine = engines_[which];
    end_look(engine);
    std::vector<std::function<void()>> admissions;
    {
      std::lock_guard const lock{mutex_};
      engine.state = engine_state::ready;
      engine.ready_since = clock::now();
      engine.last_start = engine.ready_since - engine.now.began;
      engine.has_failed_to_start = false;
      admissions = admit(engine);
    }
    spdlog::info("engine is ready engine={} took_ms={:.0f}", engine.is.name,
                 milliseconds_of(*engine.last_start));
    for (auto const& each : admissions) each();
    end_turn(which);
  }

  /// Of one that was ready, and has not been reached: it has ended, which is heard soon, or it is as before.
  void check(std::size_t which) {
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

  void on_check(std::size_t which, std::string const& why_not) {
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

  void end_turn(std::size_t which) {
    if (starting_ != which) return;
    starting_.reset();
    next_turn();
  }

  /// The process has ended, or is ended now, or could not be started.
  void on_end(std::size_t which, std::string const& how) {
    auto& engine = engines_[which];
    auto const said = engine.now.process ? engine.now.process->last_lines() : std::string{};
    engine.now.timer->cancel();
    engine.now.look.reset();
    engine.now.socket.reset();
    engine.now.process.reset();
    bool has_started = false, goes_on = false;
    std::string reason;
    {
      std::lock_guard const lock{mutex_};
      auto const now = clock::now();
      has_started = engine.state == engine_state::ready;
      engine.is_doubted = false;
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
    spdlog::error("engine has ended engine={} reason={}", engine.is.name,
                  telemetry::quoted(reason));
    if (!has_started || is_draining()) {
      refuse_waiting(which, {error_kind::unavailable, reason, restart_delay(engine.failures)});
    }
    if (goes_on) want(which);
    end_turn(which);
  }

  void look_whether_all_ended() {
    bool const has_any = std::any_of(engines_.begin(), engines_.end(),
                                     [](auto const& each) { return each.now.process != nullptr; });
    if (!has_any && all_ended_ != nullptr) std::exchange(all_ended_, nullptr)->set_value();
  }

  /// Under the mutex.
  [[nodiscard]] json describe(entry& engine) const {
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
              {"observed_attainment", nullptr}};
    if (engine.last_start) made["last_start_ms"] = milliseconds_of(*engine.last_start);
    if (auto const share = engine.in_time.read(clock::now()).share()) {
      made["observed_attainment"] = *share;
    }
    return made;
  }

  options how_;
  std::filesystem::path const socket_folder_;
  engine_routes routes_;
  net::io_context io_{1};
  net::executor_work_guard<net::io_context::executor_type> guard_{io_.get_executor()};
  std::deque<entry> engines_;                ///< as many as at the start; each says what guards it
  std::deque<std::size_t> turns_;            ///< of the thread
  std::optional<std::size_t> starting_;      ///< of the thread
  bool is_ending_ = false;                   ///< of the thread
  std::promise<void>* all_ended_ = nullptr;  ///< of the thread; whom that is said
  mutable std::mutex mutex_;
  engine_ticket last_ticket_ = 0;  ///< guarded by it
  bool is_draining_ = false;       ///< guarded by it
  std::thread thread_;
};

engine_host::engine_host(options how) : impl_(std::make_unique<impl>(std::move(how))) {}
engine_host::~engine_host() = default;

void engine_host::start() {
  impl_->start();
}
void engine_host::drain() {
  impl_->drain();
}
void engine_host::stop(milliseconds grace) {
  impl_->stop(grace);
}
std::optional<std::size_t> engine_host::find(std::string_view target) const {
  return impl_->routes().find(target);
}
std::string const& engine_host::name_of(std::size_t engine) const {
  return impl_->at(engine).name;
}
engine_limits engine_host::limits_of(std::size_t engine) const {
  return {impl_->request_timeout(), impl_->at(engine).engine->max_silence};
}
engine_ticket engine_host::enter(std::size_t engine,
                                 std::function<void(engine_admission)> admitted) {
  return impl_->enter(engine, std::move(admitted));
}
void engine_host::send_back(engine_ticket which) {
  impl_->send_back(which);
}
void engine_host::leave(engine_ticket which, relay_report const& report) {
  impl_->leave(which, report);
}
std::vector<std::string> engine_host::names() const {
  std::vector<std::string> all;
  all.reserve(impl_->size());
  for (std::size_t i = 0; i < impl_->size(); ++i) all.push_back(name_of(i));
  return all;
}
std::optional<std::size_t> engine_host::place_of(std::string_view name) const {
  for (std::size_t i = 0; i < impl_->size(); ++i) {
    if (name_of(i) == name) return i;
  }
  return std::nullopt;
}
readiness engine_host::ready(std::size_t engine) const {
  return impl_->ready(engine);
}
std::vector<std::string> engine_host::faults() const {
  return impl_->faults();
}
json engine_host::status() const {
  return impl_->status();
}

}  // namespace sluice::server
