/// The inside of remote_executor: remote_executor.cpp holds what callers reach, supervisor.cpp the thread that starts,
/// hears and ends processes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "memhandover/base/unique_fd.hpp"
#include "memhandover/base/wire.hpp"
#include "runtime/server/executor/child_process.hpp"
#include "runtime/server/executor/detail/pending_requests.hpp"
#include "runtime/server/executor/detail/spare_process.hpp"
#include "runtime/server/executor/model_health.hpp"
#include "runtime/server/executor/remote_executor.hpp"
#include "runtime/server/inference/background_thread.hpp"
#include "runtime/server/inference/host_board.hpp"
#include "scheduler/admission.hpp"

namespace sluice::server {
namespace detail {

/// The process answers at a request's deadline itself, and knows more to say; this much later it is done for it.
inline constexpr std::chrono::milliseconds deadline_slack{10};

/// A message to the process: a request, or another.
struct outgoing {
  request_ticket request = 0;
  nlohmann::json other{};
  std::shared_ptr<parcel const> orders{};  ///< or these
};

/// Why a process that served, or was to, has ended, without having been asked to.
enum class end_cause { model, hang, silence, killed, failed, unknown };
inline constexpr std::array<std::string_view, 6> end_cause_names{"model",  "hang",   "silence",
                                                                 "killed", "failed", "unknown"};

/// Answers that are given once the lock is open.
class refusals {
 public:
  void add(pending_request&& to, error why) {
    given_.emplace_back(std::move(to.done), std::move(why));
  }
  void give() {
    for (auto& [done, why] : std::exchange(given_, {})) {
      done(std::move(why));
    }
  }

 private:
  std::vector<std::pair<model_executor::completion, error>> given_;
};

/// As long as somebody else's thread reads from the process: what that may reach.
struct reading_elsewhere {
  std::mutex mutex;      ///< held while it reads
  bool is_over = false;  ///< under it
  std::atomic<bool> goes_on = true;
};

}  // namespace detail

class remote_executor::impl {
 public:
  explicit impl(options how);
  impl(impl const&) = delete;
  impl& operator=(impl const&) = delete;
  impl(impl&&) = delete;
  impl& operator=(impl&&) = delete;
  ~impl();

  bool wait_until_ready(std::function<bool()> const& given_up);

  [[nodiscard]] readiness ready() const;
  [[nodiscard]] model_state state(model_index model) const;
  [[nodiscard]] readiness model_ready(model_index model) const;
  [[nodiscard]] std::optional<error> unservable(model_index model) const;
  request_ticket submit(model_index model, infer_request request, completion done);
  void cancel(request_ticket which);
  void keep_warm();
  void announce_engine();
  [[nodiscard]] bool change(orders to);
  void end_changes();
  [[nodiscard]] bool is_free(model_index place) const;
  [[nodiscard]] nlohmann::json status();
  enum class way_to_end { giving_back, leaving, at_once };
  [[nodiscard]] bool stop(std::chrono::milliseconds grace, way_to_end way);

 private:
  using clock = std::chrono::steady_clock;
  enum class phase { starting, serving, between, ended };
  static char const* to_string(phase value);

  // With the lock held, from any thread.
  [[nodiscard]] model_state state_now(model_index model) const;
  [[nodiscard]] std::optional<error> refuse(model_index model, clock::time_point now) const;
  /// In words that go on after its name; it has failed, and is not tried yet.
  [[nodiscard]] std::string failure_text(model_index model, clock::time_point now) const;
  void refuse(detail::pending_request&& which, error why, detail::refusals& into);
  /// Where it could not be answered in time (scheduler/admission.hpp).
  [[nodiscard]] error too_late(model_index model, scheduler::admission::verdict const& verdict,
                               scheduler::seconds left) const;
  [[nodiscard]] std::optional<scheduler::instant> computed_since(request_ticket which) const;
  void refuse_cancelled(detail::refusals& into);
  void send(detail::outgoing what);

  /// What the socket takes now.
  void flush();
  void wake();
  /// Of the process that has been told to; it is killed where that takes too long.
  void await_end_within(std::chrono::milliseconds grace, std::unique_lock<std::mutex>& lock);
  void describe(nlohmann::json& into) const;

  // The supervisor's.
  void supervise();
  [[nodiscard]] clock::time_point next_look() const;

  /// Whether the process is still there.
  bool wait_and_receive(int socket, bool is_full, int spare, clock::time_point until);
  /// What has come, a bounded number of messages; false if nothing more will.
  bool receive(int socket);
  void read_elsewhere(int socket);
  void end_reading_elsewhere();
  void take(memhandover::message received);
  void note_unservable(memhandover::message const& ready);
  void answer(detail::pending_request to, memhandover::message received);
  void finish(detail::pending_request to, memhandover::message const& received);
  void start_process();
  /// Orders of that type, by the lock's holder.
  [[nodiscard]] parcel orders_of(char const* type) const;
  void send_change();
  void refuse_retired();
  static void give_orders(int socket, parcel const& orders, int board);
  void start_again();
  [[nodiscard]] bool is_quiet() const;
  void look_after_spare();
  void be_between();
  void end(bool well);

  [[nodiscard]] std::vector<host_board::action> computations() const;
  /// A process that hangs, or does not answer, is ended; what follows, follows as for one that ended by itself.
  void watch_over();
  void kill(std::string why);
  void await_end();
  void on_end(detail::refusals& into);
  [[nodiscard]] std::vector<host_board::action> suspects_of(process_end const& how) const;
  [[nodiscard]] detail::end_cause cause_of(process_end const& how,
                                           std::vector<host_board::action> const& suspects) const;
  [[nodiscard]] std::string doing_text(std::vector<host_board::action> const& suspects) const;
  [[nodiscard]] bool may_try_again(host_board::action const& suspect);
  void blame(host_board::action const& doing, detail::refusals& into);
  /// Whether the process reads files of models, for its start or for a change.
  [[nodiscard]] bool is_preparing() const;
  void expire(detail::refusals& into);

  options const how_;
  memhandover::unique_fd const wake_;
  std::atomic<request_ticket> last_ticket_ = 0;

  mutable std::mutex mutex_;  ///< guards what follows
  std::condition_variable changed_;
  orders orders_;
  std::uint64_t orders_number_ = 1;             ///< grows when they change
  std::uint64_t given_orders_ = 0;              ///< those of the process
  std::uint64_t carried_out_ = 0;               ///< by a process that serves
  bool has_served_ = false;                     ///< one of them
  bool changes_end_ = false;                    ///< nobody waits for one any more
  std::vector<std::optional<error>> left_out_;  ///< by model: it has ended a process that read it
  phase phase_ = phase::starting;
  scheduler::admission admission_;
  scheduler::admission::sight const host_;
  detail::pending_requests pending_;
  std::vector<model_health> health_;
  std::vector<std::string> last_offences_;        ///< by model
  std::vector<std::optional<error>> unservable_;  ///< by model, as the last process has said
  std::deque<detail::outgoing> outbox_;
  detail::refusals late_answers_;  ///< the supervisor gives them
  memhandover::unique_fd socket_;  ///< changed by the supervisor alone
  child_process child_;
  bool was_spare_ = false, was_ready_spare_ = false;  ///< that process
  detail::spare_process spare_;                       ///< changed by the supervisor alone
  request_ticket waited_until_ = 0;  ///< the last request when the process was ready
  clock::time_point ready_since_;
  std::shared_ptr<host_board> board_;
  std::string status_;
  std::uint64_t statuses_ = 0;
  std::uint64_t started_ = 0;
  std::array<std::uint64_t, detail::end_cause_names.size()> ends_{};  ///< by `end_cause`
  std::optional<error> failure_;                                      ///< of the first process
  std::optional<error> reason_;  ///< why this process says that it ends
  std::string killed_for_, last_end_;
  std::string how_it_ended_;                ///< the same, without what it did
  std::optional<host_board::action> hung_;  ///< for which it has been killed
  clock::time_point heard_, next_start_, sleeps_until_;
  std::optional<clock::time_point> asked_;
  std::chrono::milliseconds back_off_{0};
  bool stopping_ = false, ended_well_ = false;
  bool is_dropped_ = false;  ///< killed by `stop`, since nothing is lost with it
  bool is_read_ = false;     ///< it has been tried that somebody else does

  std::shared_ptr<detail::reading_elsewhere> elsewhere_;  ///< the supervisor's
  background_thread bodies_;                              ///< for large answers
  std::thread supervisor_;
};

}  // namespace sluice::server
