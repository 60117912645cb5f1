/// The insides of engine_host, in five parts that share its thread and its mutex:
///
///   engine_models.cpp     what its models are called; from any thread, and on the thread where the engine is asked
///   engine_requests.cpp   who may enter, who waits, and what is told of an engine; from any thread
///   engine_life.cpp       starts, looks whether they are ready, ends; on the thread
///   engine_adoption.cpp   what is left to a successor, and taken over from a predecessor; on the thread
///   engine_parking.cpp    orders that memory goes and comes back; on the thread, the broker being asked by another one
#pragma once

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <chrono>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/engines/described_models.hpp"
#include "runtime/server/engines/engine_host.hpp"
#include "runtime/server/engines/engine_process.hpp"
#include "runtime/server/engines/engine_question.hpp"
#include "runtime/server/engines/engine_routes.hpp"
#include "runtime/server/engines/engine_state.hpp"
#include "runtime/server/engines/engine_tenancy.hpp"
#include "runtime/server/engines/kept_connections.hpp"
#include "runtime/server/engines/served_models.hpp"
#include "runtime/server/engines/token_account.hpp"
#include "scheduler/estimators.hpp"
#include "scheduler/model_controller.hpp"

namespace sluice::server {

namespace net = boost::asio;

class engine_host::impl {
 public:
  using clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;

  explicit impl(options how);
  impl(impl const&) = delete;
  impl& operator=(impl const&) = delete;
  impl(impl&&) = delete;
  impl& operator=(impl&&) = delete;
  ~impl();

  void attach(engine_tenancy::access pool);
  void start();
  void set_announcer(std::function<void()> announce);
  void drain();
  void stop(milliseconds grace);

  // --- engine_adoption.cpp
  std::size_t meet();
  void adopt();
  [[nodiscard]] std::size_t adopted() const;
  void leave();
  void release();
  [[nodiscard]] std::size_t in_flight() const;

  [[nodiscard]] engine_routes const& routes() const { return routes_; }
  [[nodiscard]] policy::model_policy const& at(std::size_t engine) const {
    return engines_[engine].is;
  }
  [[nodiscard]] std::size_t size() const { return engines_.size(); }
  [[nodiscard]] std::chrono::microseconds request_timeout() const { return how_.request_timeout; }

  // --- engine_models.cpp
  [[nodiscard]] std::optional<std::size_t> find_model(std::string_view name) const;
  [[nodiscard]] std::vector<std::string> model_names() const;
  [[nodiscard]] nlohmann::json models();
  [[nodiscard]] std::vector<std::string> names() const;
  [[nodiscard]] std::optional<std::size_t> place_of(std::string_view name) const;
  [[nodiscard]] model_metadata metadata(std::string const& model, std::string const& version) const;
  [[nodiscard]] nlohmann::json config(std::string const& model, std::string const& version) const;

  // --- engine_requests.cpp
  engine_ticket enter(std::size_t which, std::function<void(engine_admission)> admitted);
  [[nodiscard]] engine_connection reuse(engine_ticket ticket);
  void keep(engine_ticket ticket, engine_connection connection);
  void note_tokens(engine_ticket ticket, token_times const& came);
  void send_back(engine_ticket ticket);
  void leave(engine_ticket ticket, relay_report const& report);
  [[nodiscard]] readiness ready(std::size_t which) const;
  [[nodiscard]] std::vector<std::string> faults() const;
  [[nodiscard]] nlohmann::json status();
  void change(std::vector<policy::model_policy> const& wanted);

 private:
  using calls = std::vector<std::function<void()>>;

  /// What the host's thread alone has of an engine.
  struct run {
    std::unique_ptr<engine_process> process;
    std::unique_ptr<net::posix::stream_descriptor> socket;  ///< its own descriptor of the same
    std::shared_ptr<void> look;
    std::shared_ptr<void> question;   ///< after its models
    std::deque<std::string> unasked;  ///< paths of more of these
    std::unique_ptr<net::steady_timer> timer;
    milliseconds next_look{};
    clock::time_point began{};
    std::string why_not;     ///< it is ready
    bool has_asked = false;  ///< after its models, in this run
    // As the server before this one has left it:
    bool was_ready = false, was_parked_by_operator = false;
    // Of its memory:
    std::unique_ptr<net::steady_timer> parking_timer;
    clock::time_point parking_began{};
    std::string park_refusal_logged;
  };

  /// An engine of a server before this one that is not wanted as it is.
  struct retired {
    std::unique_ptr<engine_process> process;
    std::unique_ptr<net::posix::stream_descriptor> socket;
    std::unique_ptr<net::steady_timer> timer;
    std::optional<std::size_t> instead;  ///< what waits for its end
    bool ends = false;                   ///< it has been told to
  };

  /// How long a device computes for a request, by what the pool says in all.
  class busy_time {
   public:
    void add(scheduler::seconds worked, std::uint64_t answered);
    [[nodiscard]] std::optional<scheduler::seconds> of_request() const noexcept { return mean_; }

   private:
    scheduler::seconds worked_{};  ///< up to the last that has been counted
    std::uint64_t answered_ = 0;
    std::optional<scheduler::seconds> mean_{};
  };

  struct entry {
    explicit entry(policy::model_policy of);

    policy::model_policy is;
    served_models models;        ///< guarded by the mutex
    described_models described;  ///< with api oip; guarded by the mutex
    clock::time_point asked{};   ///< after them; guarded by the mutex
    run now{};                   ///< of the thread
    // What follows is guarded by the mutex.
    engine_state state = engine_state::cold;
    engine_address address{};
    std::string reason{};  ///< why it is not ready, or why it ended last
    clock::time_point ready_since{}, next_start{}, idle_since{};
    unsigned failures = 0;  ///< in a row
    bool has_failed_to_start = false;
    int pid = 0;
    std::map<engine_ticket, std::function<void(engine_admission)>> waiting{};
    std::map<engine_ticket, std::function<void(engine_admission)>> inside{};
    kept_connections kept;
    bool is_doubted = false;   ///< ready, but somebody has not reached it
    bool by_operator = false;  ///< parked, and not by this host
    bool is_adopted = false;   ///< this run has been started by a server before this one
    bool is_shared = false;    ///< … which has requests there still
    bool is_used = false;      ///< has, or had a moment ago, requests; the pool is told so
    relay_counts counts{};
    std::uint64_t starts = 0, ends = 0;
    std::uint64_t parks_before = 0;  ///< of processes that have ended
    std::optional<clock::duration> last_start{}, last_wake{};
    scheduler::attainment_window in_time;
    token_account tokens;
    std::optional<engine_share> share{};  ///< as the broker said last
    std::string park_refusal{};           ///< why it could not be parked the last time
    std::string kv_fault{};               ///< why its KV cache is not the pool's, as it was to be
    scheduler::model_controller controller;
    busy_time busy;

    [[nodiscard]] bool is_tenant() const { return is.engine->is_tenant(); }
  };

  void work();

  // --- engine_requests.cpp
  [[nodiscard]] std::optional<error> refusal_of(entry const& engine) const;
  [[nodiscard]] static bool has_room(entry const& engine);
  [[nodiscard]] static std::string cannot_start(entry const& engine);
  [[nodiscard]] static calls admit(entry& engine);
  static void note_for_scheduler(entry& engine, relay_report const& report);
  [[nodiscard]] std::optional<scheduler::seconds> idle_timeout_of(entry const& engine) const;
  void doubt(std::size_t which);
  [[nodiscard]] entry* holder_of(engine_ticket ticket);
  void close_kept();
  void refuse_waiting(std::size_t which, error const& why);
  [[nodiscard]] nlohmann::json describe(entry& engine) const;
  [[nodiscard]] std::filesystem::path log_of(entry const& engine) const;
  [[nodiscard]] bool is_draining() const;
  [[nodiscard]] bool may_enter(entry const& engine) const;

  // --- engine_models.cpp
  void ask_for_models(std::size_t which);
  void ask_next(std::size_t which);
  void on_models(std::size_t which, std::string const& path, engine_answer const& answer);
  void note_models(std::size_t which, std::string const& body);
  [[nodiscard]] static error unsaid(entry const& engine, std::string const& model,
                                    std::string const& version);

  // --- engine_life.cpp
  void want(std::size_t which);
  void queue(std::size_t which);
  void next_turn();
  void begin(std::size_t which);
  [[nodiscard]] engine_order order_of(entry const& engine, engine_address const& address) const;
  void listen(std::size_t which);
  void await_word(std::size_t which);
  void hear(std::size_t which);
  [[nodiscard]] bool is_awaited(std::size_t which) const;
  void look(std::size_t which);
  void end_look(entry& engine);
  [[nodiscard]] engine_address address_of(entry const& engine) const;
  void on_look(std::size_t which, std::string const& why_not);
  void on_ready(std::size_t which);
  void check(std::size_t which);
  void on_check(std::size_t which, std::string const& why_not);
  void end_turn(std::size_t which);
  void on_end(std::size_t which, std::string const& how);
  void look_whether_all_ended();

  // --- engine_adoption.cpp
  [[nodiscard]] nlohmann::json identity_of(entry const& engine) const;
  [[nodiscard]] std::optional<std::size_t> place_for(engine_process const& met) const;
  void await(std::size_t which, std::unique_ptr<engine_process> met);
  void on_yours(std::size_t which, nlohmann::json const& said);
  void find_out(std::size_t which);
  void go_on(std::size_t which);
  void on_lost(std::size_t which);
  void go_on_if_wanted(std::size_t which);
  void retire(std::unique_ptr<engine_process> met);
  void hear_retired(std::shared_ptr<retired> const& of);
  void await_retired(std::shared_ptr<retired> const& of);
  void end_retired(std::shared_ptr<retired> const& of);
  void on_retired(std::shared_ptr<retired> const& of);
  [[nodiscard]] bool waits_for_retired(std::size_t which) const;
  void forget_retired();
  void leave(std::size_t which);
  void release_if_done(std::size_t which);
  static void drop_process(entry& engine);
  void end_in_order(std::size_t which);

  // --- engine_parking.cpp
  void watch();
  void watch_again();
  void look_at_all();
  void on_all_seen(std::vector<std::size_t> const& which, std::vector<pid_t> const& roots,
                   std::vector<engine_share> const& seen);
  void say_use(std::size_t which);
  [[nodiscard]] bool is_run_of(std::size_t which, pid_t root) const;
  void park_idle();
  [[nodiscard]] std::optional<clock::time_point> idle_end(entry const& engine) const;
  void on_seen(std::size_t which, engine_share const& seen);
  void note_cache(entry& engine, engine_share const& seen);
  void park(std::size_t which);
  void order_away(std::size_t which);
  void wake(std::size_t which);
  void after(std::size_t which, milliseconds pause, void (impl::*next)(std::size_t));
  void park_another_for(std::size_t which);
  void look_whether_away(std::size_t which);
  void look_whether_back(std::size_t which);
  void on_away(std::size_t which);
  void on_back(std::size_t which);
  void give_up_parking(std::size_t which, std::string const& why);
  void give_up_waking(std::size_t which, engine_share const& seen);
  void ask_broker(std::size_t which, std::function<engine_share(pid_t root)> question,
                  std::function<void(engine_share const&, std::string const& failure)> then);
  [[nodiscard]] engine_state state_of(std::size_t which) const;

  options how_;
  engine_routes routes_;
  std::map<std::string, std::size_t, std::less<>> by_name_;  ///< never changes
  net::io_context io_{1};
  net::executor_work_guard<net::io_context::executor_type> guard_{io_.get_executor()};
  std::deque<entry> engines_;            ///< as many as at the start; each says what guards it
  std::deque<std::size_t> turns_;        ///< of the thread
  std::optional<std::size_t> starting_;  ///< of the thread
  bool may_start_ = false;               ///< of the thread
  bool is_ending_ = false;               ///< of the thread
  bool gives_away_ = false;              ///< of the thread; what has been left is let go
  std::vector<std::unique_ptr<engine_process>> met_;  ///< between `meet` and `adopt`
  std::vector<std::shared_ptr<retired>> retired_;     ///< of the thread
  std::promise<void>* all_ended_ = nullptr;           ///< of the thread; whom that is said
  std::optional<engine_tenancy> pool_;  ///< nothing before `attach`; never changes then
  net::steady_timer watching_{io_};     ///< of the thread
  clock::time_point next_watch_{};      ///< of the thread
  net::steady_timer closing_{io_};      ///< of the thread; when kept connections are old
  mutable std::mutex mutex_;
  engine_ticket last_ticket_ = 0;  ///< guarded by it
  bool closes_kept_ = false;       ///< guarded by it; `closing_` runs
  bool is_draining_ = false;       ///< guarded by it
  bool is_leaving_ =
      false;  ///< guarded by it; draining, and what has a process may be entered still
  std::size_t adopted_ = 0;         ///< guarded by it
  std::function<void()> announce_;  ///< guarded by it
  net::thread_pool broker_{1};      ///< asks the broker, which may take its time
  std::thread thread_;
};

/// Of a start, or a time in host copies.
[[nodiscard]] inline double milliseconds_of(std::chrono::steady_clock::duration value) {
  return std::chrono::duration<double, std::milli>{value}.count();
}

[[nodiscard]] inline std::string text_of(engine_address const& address) {
  return address.socket.empty() ? "127.0.0.1:" + std::to_string(address.port) : address.socket;
}

[[nodiscard]] inline error shutting_down() {
  return {error_kind::unavailable, "the server is shutting down"};
}

}  // namespace sluice::server
