/// The insides of engine_host, in three parts that share its thread and its mutex:
///
///   engine_requests.cpp   who may enter, who waits, and what is told of an engine; from any thread
///   engine_life.cpp       starts, looks whether they are ready, ends; on the thread
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
#include "runtime/server/engines/engine_host.hpp"
#include "runtime/server/engines/engine_process.hpp"
#include "runtime/server/engines/engine_routes.hpp"
#include "runtime/server/engines/engine_state.hpp"
#include "runtime/server/engines/engine_tenancy.hpp"
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
  void drain();
  void stop(milliseconds grace);

  [[nodiscard]] engine_routes const& routes() const { return routes_; }
  [[nodiscard]] policy::model_policy const& at(std::size_t engine) const {
    return engines_[engine].is;
  }
  [[nodiscard]] std::size_t size() const { return engines_.size(); }
  [[nodiscard]] std::chrono::microseconds request_timeout() const { return how_.request_timeout; }

  // --- engine_requests.cpp
  engine_ticket enter(std::size_t which, std::function<void(engine_admission)> admitted);
  void send_back(engine_ticket ticket);
  void leave(engine_ticket ticket, relay_report const& report);
  [[nodiscard]] readiness ready(std::size_t which) const;
  [[nodiscard]] std::vector<std::string> faults() const;
  [[nodiscard]] nlohmann::json status();

 private:
  using calls = std::vector<std::function<void()>>;

  /// What the host's thread alone has of an engine.
  struct run {
    std::unique_ptr<engine_process> process;
    std::unique_ptr<net::posix::stream_descriptor> socket;  ///< its own descriptor of the same
    std::shared_ptr<void> look;
    std::unique_ptr<net::steady_timer> timer;
    milliseconds next_look{};
    clock::time_point began{};
    std::string why_not;  ///< it is ready
    // Of its memory:
    std::unique_ptr<net::steady_timer> parking_timer;
    clock::time_point parking_began{};
    std::string park_refusal_logged;
  };

  struct entry {
    explicit entry(policy::model_policy of);

    policy::model_policy is;
    run now{};  ///< of the thread
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
    bool is_doubted = false;   ///< ready, but somebody has not reached it
    bool by_operator = false;  ///< parked, and not by this host
    relay_counts counts{};
    std::uint64_t starts = 0, ends = 0;
    std::uint64_t parks_before = 0;  ///< of processes that have ended
    std::optional<clock::duration> last_start{}, last_wake{};
    scheduler::attainment_window in_time;
    std::optional<engine_share> share{};  ///< as the broker said last
    std::string park_refusal{};           ///< why it could not be parked the last time
    scheduler::model_controller controller;

    [[nodiscard]] bool is_tenant() const {
      return is.engine->memory == policy::engine_memory::pool;
    }
  };

  void work();
  [[nodiscard]] std::filesystem::path folder_for_sockets() const;

  // --- engine_requests.cpp
  [[nodiscard]] std::optional<error> refusal_of(entry const& engine) const;
  [[nodiscard]] static bool has_room(entry const& engine);
  [[nodiscard]] static std::string cannot_start(entry const& engine);
  [[nodiscard]] static calls admit(entry& engine);
  static void note_for_scheduler(entry& engine, relay_report const& report);
  [[nodiscard]] std::optional<scheduler::seconds> idle_timeout_of(entry const& engine) const;
  void doubt(std::size_t which);
  void refuse_waiting(std::size_t which, error const& why);
  [[nodiscard]] nlohmann::json describe(entry& engine) const;
  [[nodiscard]] std::filesystem::path log_of(entry const& engine) const;
  [[nodiscard]] bool is_draining() const;

  // --- engine_life.cpp
  void want(std::size_t which);
  void queue(std::size_t which);
  void next_turn();
  void begin(std::size_t which);
  [[nodiscard]] engine_order order_of(entry const& engine, engine_address const& address) const;
  void listen(std::size_t which);
  void await_word(std::size_t which);
  void hear(std::size_t which);
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

  // --- engine_parking.cpp
  void watch();
  void watch_again();
  void park_idle();
  [[nodiscard]] std::optional<clock::time_point> idle_end(entry const& engine) const;
  void on_seen(std::size_t which, engine_share const& seen);
  void park(std::size_t which);
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
  std::filesystem::path const socket_folder_;
  engine_routes routes_;
  net::io_context io_{1};
  net::executor_work_guard<net::io_context::executor_type> guard_{io_.get_executor()};
  std::deque<entry> engines_;                ///< as many as at the start; each says what guards it
  std::deque<std::size_t> turns_;            ///< of the thread
  std::optional<std::size_t> starting_;      ///< of the thread
  bool is_ending_ = false;                   ///< of the thread
  std::promise<void>* all_ended_ = nullptr;  ///< of the thread; whom that is said
  std::optional<engine_tenancy> pool_;       ///< nothing before `attach`; never changes then
  net::steady_timer watching_{io_};          ///< of the thread
  clock::time_point next_watch_{};           ///< of the thread
  mutable std::mutex mutex_;
  engine_ticket last_ticket_ = 0;  ///< guarded by it
  bool is_draining_ = false;       ///< guarded by it
  net::thread_pool broker_{1};     ///< asks the broker, which may take its time
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
