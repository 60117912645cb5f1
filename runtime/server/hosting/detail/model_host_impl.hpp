/// The inside of model_host: what its threads share. model_host.cpp holds what callers reach and what several threads use,
/// executor.cpp, computing.cpp and timekeeper.cpp what one kind of thread does.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include "memhandover/allocation/tensor_heap.hpp"
#include "memhandover/base/error.hpp"
#include "runtime/server/hosting/compute_lease.hpp"
#include "runtime/server/hosting/detail/waiting_threads.hpp"
#include "runtime/server/hosting/model_host.hpp"
#include "runtime/server/inference/caught_error.hpp"
#include "scheduler/device_demands.hpp"
#include "scheduler/joint_keeping.hpp"
#include "scheduler/parallelism.hpp"
#include "scheduler/reserve.hpp"

namespace sluice::server {
namespace detail {

using clock = std::chrono::steady_clock;

/// A request that waits or runs.
struct job {
  request_ticket ticket = 0;
  std::size_t model = 0;
  infer_request request;
  model_host::completion done;  ///< empty: it has been answered
  clock::time_point arrival, deadline;
  bool found_cold = false;
  bool is_warmup = false;  ///< of nobody, and counts nowhere
  bool is_retry = false;   ///< it has been refused before
  std::uint32_t priority = 0;
  std::int64_t samples = 1;
  std::string shape{};  ///< what can be in one batch has the same; empty where none is made
  clock::time_point late_after{};  ///< when its time in the queue is over
};

struct answer {
  model_host::completion done;
  infer_result result;

  void deliver() noexcept;
};

/// Requests that are computed together, and of one model.
using batch = std::vector<std::list<job>::iterator>;

/// What came of one request of a batch.
struct call_outcome {
  infer_result result;
  clock::time_point begin{}, end{};
  batch_share share;
};

/// How many compute at once, summed over time.
class company {
 public:
  void change(clock::time_point now, std::ptrdiff_t by) {
    sum_ += static_cast<double>(count_) * std::chrono::duration<double>{now - since_}.count();
    since_ = now;
    count_ += by;
  }
  [[nodiscard]] std::size_t count() const noexcept { return static_cast<std::size_t>(count_); }
  /// In seconds times computations, up to the last change.
  [[nodiscard]] double sum() const noexcept { return sum_; }

 private:
  clock::time_point since_;
  std::ptrdiff_t count_ = 0;
  double sum_ = 0.0;
};

/// A model and what is known of it.
struct slot {
  /// Throws `invalid_argument` for settings that the scheduler refuses.
  explicit slot(served_model from);

  /// Of the scheduler, and for the bounds of its queue. Throws likewise.
  void revise(served_model& to);

  served_model is;
  scheduler::model_controller controller;
  scheduler::model_report report;
  std::optional<scheduler::prediction>
      together;  ///< in force instead of its own choice, where memory is short
  model_state state = model_state::cold;
  memhandover::loaded_tensors memory;  ///< the executor's
  clock::time_point idle_since;
  clock::time_point prewarm_tried = clock::time_point::min();  ///< last
  bool prewarm_unused = false;                   ///< loaded unasked, and not asked since
  std::optional<clock::time_point> computed;     ///< last, as long as something may be kept of that
  bool miss_is_reported = false;                 ///< that its promise is predicted to be missed
  std::optional<clock::time_point> keeps_since;  ///< and since when it is not any more
  std::string stands_for;  ///< what of it is for those models alone that fill the same memory alike
  bool load_wanted = false;
  bool rest_wanted = false;   ///< it has not computed for a while
  bool taken = false;         ///< a thread does something with it beside which nothing is computed
  bool held = false;          ///< it is to be released as soon as it is not in use
  bool offered = false;       ///< for publication, however that came out
  bool published = false;     ///< a successor may have it
  bool keeps_memory = false;  ///< it could not be unloaded: never released again
  bool gives_way =
      false;  ///< it takes no requests, and is released when it has none: its memory is a job's
  bool is_retired = false;   ///< it takes no more requests, and leaves when it has none
  bool has_left = false;     ///< nothing is served here
  bool image_wanted = true;  ///< as soon as there is nothing else to be done
  std::optional<error> image_failure;
  std::optional<error_kind> failing_with;  ///< the last cold start
  std::size_t vain_batches = 0;  ///< in turn that failed, although no request by itself did
  std::uint64_t looked_at = 0;   ///< the choice that has last asked about it
  std::chrono::nanoseconds longest_computation{};  ///< of the last ones
  std::list<clock::time_point> computations;       ///< that are under way: when each began
  company own_company;                             ///< of its computations alone
  std::size_t queue = 0;                           ///< waiting and running
  std::uint64_t requests = 0, failed = 0, cancelled = 0, cold_starts = 0;
  std::uint64_t prewarms = 0, prewarms_used = 0, prewarms_omitted = 0;

  [[nodiscard]] bool lacks_image() const noexcept;
  /// A cold start has to, unless it is one to try again.
  [[nodiscard]] bool waits_for_image() const noexcept;
  [[nodiscard]] bool is_in_use() const noexcept { return taken || !computations.empty(); }
  /// One that is not held may be computed once more at the same time.
  [[nodiscard]] bool can_compute() const noexcept;
};

[[nodiscard]] inline memhandover::residence residence_of(slot const& model) {
  return model.is.always_warm ? memhandover::residence::lasting : memhandover::residence::passing;
}

[[nodiscard]] inline double microseconds(std::chrono::nanoseconds value) {
  return std::chrono::duration<double, std::micro>{value}.count();
}

/// The board says what is done as long as it lives.
class shown_action {
 public:
  shown_action(host_board& board, activity what, std::size_t model, request_ticket request = 0,
               std::size_t requests = 1)
      : board_(board) {
    board_.begin({.what = what, .model = model, .request = request, .requests = requests});
  }
  shown_action(shown_action const&) = delete;
  shown_action& operator=(shown_action const&) = delete;
  ~shown_action() { board_.end(); }

 private:
  host_board& board_;
};

/// A failure that the client caused, or that the model itself raises, says nothing about the promise: neither memory nor
/// time would have kept it.
[[nodiscard]] constexpr bool counts_against_promise(error_kind kind) noexcept {
  return kind != error_kind::invalid_argument && kind != error_kind::unsupported &&
         kind != error_kind::model_error;
}

}  // namespace detail

class model_host::impl {
  /// After so many in turn a model is taken for one that cannot compute requests together.
  static constexpr std::size_t most_vain_batches = 3;

 public:
  using clock = detail::clock;

  impl(host_options options, std::shared_ptr<memhandover::serving_pool> pool,
       std::vector<served_model> models);
  impl(impl const&) = delete;
  impl& operator=(impl const&) = delete;
  impl(impl&&) = delete;
  impl& operator=(impl&&) = delete;
  ~impl();

  bool warm_up(std::function<bool()> const& given_up);
  [[nodiscard]] model_state state(model_index model) const;
  /// The caller may compute it here afterwards.
  request_ticket submit(model_index model, infer_request request, completion done,
                        bool computes_here);
  void prepare_to_compute();
  bool compute_here();
  void cancel(request_ticket which);
  void keep_warm();
  void announce_engine();
  void note_refused(model_index model, std::uint64_t mark, std::chrono::milliseconds retry_after);
  void put(model_index place, served_model model);
  void revise(model_index place, served_model to);
  void retire(model_index place);
  [[nodiscard]] host_snapshot snapshot() const;
  [[nodiscard]] bool stop(std::chrono::milliseconds grace);

 private:
  using lock_type = std::unique_lock<std::mutex>;
  using slot = detail::slot;

  // Of the threads that compute. As below.
  void compute();
  [[nodiscard]] detail::batch next_computable();
  [[nodiscard]] std::optional<clock::time_point> hindered_until() const;
  [[nodiscard]] detail::batch next_of(model_index place);
  [[nodiscard]] static bool is_free(slot const& model);
  [[nodiscard]] static bool is_known_quick(slot const& model);
  [[nodiscard]] bool has_work_for_another() const;
  void wake_executor_for(slot const& model);
  void run(lock_type& lock, detail::batch const& batch);
  [[nodiscard]] bool note(detail::job const& job, detail::call_outcome& is, double at_once);
  void note_batch(slot& model, std::size_t requests, bool in_vain) const;
  [[nodiscard]] std::vector<detail::call_outcome> outcomes_of(slot const& model,
                                                              detail::batch const& batch,
                                                              bool& in_vain) const;
  [[nodiscard]] detail::call_outcome compute_alone(slot const& model, detail::job& job) const;
  [[nodiscard]] std::vector<detail::call_outcome> compute_together(
      slot const& model, detail::batch const& batch) const;
  [[nodiscard]] error failure_of(hosted_model const& model) const;
  void prepare_thread();

  // The executor's. With a `lock_type&` they are called, and return, with the lock held, and let go
  // of it in between.
  void execute();
  void work_off(lock_type& lock);
  void next_step(lock_type& lock);
  [[nodiscard]] bool serve(lock_type& lock);
  void rest();
  [[nodiscard]] bool is_for_executor(detail::job const& job) const;
  void take_over(lock_type& lock);
  void take_over(lock_type& lock, slot& model);
  void publish(lock_type& lock, slot& model);
  void recall(slot& model) const;
  static void want_image(slot& model);
  [[nodiscard]] slot* next_image();
  void extend_image(lock_type& lock, slot& model);
  void load(lock_type& lock, model_index number, clock::time_point deadline);
  /// What has come of a load.
  struct load_outcome {
    clock::time_point begin{}, end{};
    host_snapshot::handover event{};
    std::optional<error> failure{};
  };
  template <typename Lend, typename Copy>
  [[nodiscard]] load_outcome fill(lock_type& lock, slot& model, Lend const& lend, Copy const& copy);
  void note_load(slot& model, load_outcome made, char const* what);
  [[nodiscard]] std::optional<clock::time_point> prewarm_time(slot const& model,
                                                              clock::time_point now) const;
  [[nodiscard]] slot* due_prewarm(clock::time_point now);
  void prewarm(lock_type& lock, slot& model);
  static void omit_prewarm(slot& model, error const& why);
  [[nodiscard]] memhandover::loaded_tensors obtain(slot const& model, clock::time_point deadline,
                                                   memhandover::handover_report& report);
  [[nodiscard]] bool evict_for(slot const& model, std::uint64_t missing,
                               clock::time_point deadline);
  [[nodiscard]] bool release(lock_type& lock, slot& model, char const* why);
  void have_rest(lock_type& lock, slot& model);
  [[nodiscard]] static bool is_to_leave(slot const& model);
  void see_off(lock_type& lock, slot& model);
  [[nodiscard]] bool has_for_executor() const;
  void wait_for_work(lock_type& lock, clock::time_point looked);
  [[nodiscard]] std::optional<clock::time_point> idle_end(slot const& model,
                                                          clock::time_point now) const;
  void refuse_while_owed(slot const& model) const;

  // The timekeeper's.
  void keep_time();
  void keep_time_once(lock_type& lock);
  void deliver_refusals(lock_type& lock);
  void expire(clock::time_point now);
  void expire_computing(clock::time_point now);
  void tick(lock_type& lock, clock::time_point now);
  void decide(lock_type& lock, clock::time_point now);
  void predict_together(lock_type& lock, clock::time_point now);
  void share_memory(lock_type& lock);
  static void report_promise(slot& model, clock::time_point now);
  void keep_reserve(lock_type& lock);
  void prepare_memory(lock_type& lock);
  void rest_activations(lock_type& lock, clock::time_point now);
  void keep_learnt(lock_type& lock);
  void sleep(lock_type& lock);

  /// With the lock held, which it lets go of in between.
  void write_learnt(lock_type& lock);
  void end_executors();
  void give_back_activations() const;

  // Everybody's, with the lock held.
  void call_off_prewarm();
  void join_or_call_off_prewarm(slot const& wanted);
  [[nodiscard]] static bool makes_batches(slot const& model);
  static void classify(detail::job& job, slot const& model);
  [[nodiscard]] clock::time_point ends_waiting(detail::job const& job) const;
  void give_way(clock::time_point now);
  void gather_owed(lock_type& lock, clock::time_point now);
  void gather_needed(lock_type& lock, clock::time_point now);
  void choose_who_gives_way(std::uint64_t missing_bytes);
  [[nodiscard]] static std::vector<slot*> cheapest_of(std::vector<slot*> const& candidates,
                                                      std::uint64_t missing);
  [[nodiscard]] std::optional<error> refuse_for_a_job(slot const& model) const;
  [[nodiscard]] std::optional<error> refuse_of_its_priority(detail::job const& job,
                                                            slot const& model) const;
  void set_state(slot& model, model_state state);
  [[nodiscard]] model_index place_of(slot const& model) const;
  void hold_for_engines();
  [[nodiscard]] bool claims_by_requests() const noexcept;
  [[nodiscard]] bool is_in_demand() const;
  void end_claim_if_idle();
  void look_after_pause(clock::time_point now);
  void release_pause_if_unwanted();
  void hold_compute();
  [[nodiscard]] bool wants_compute() const;
  void wake_timekeeper();
  void publish_run_ahead();
  void refuse(detail::job&& late, error reason);
  void answer_running(detail::job& job, error reason);
  void refuse_all_of(model_index number, error const& reason);
  [[nodiscard]] bool is_preparing(bool images) const;
  void expect_compute(slot const& model);
  void count_failure(detail::job const& of);
  void break_promise(detail::job const& to, clock::time_point now);
  void compute_samples(model_index place);
  void on_sample(std::string const& model, infer_result const& result);

  host_options const options_;
  std::shared_ptr<memhandover::serving_pool> const pool_;
  std::shared_ptr<host_board> const board_;
  memhandover::tensor_heap heap_;

  /// Guards all below, but for `slot::memory` and `slot::is.model`, which are of the thread that has taken the model,
  /// else the executor's, and `keeper_`, which one thread uses.
  mutable std::mutex mutex_;
  std::condition_variable work_;      ///< wakes the executor
  detail::waiting_threads computes_;  ///< wakes those who compute
  std::condition_variable timekeeper_wakes_;
  /// Wakes callers, and who waits for a model: a wanted load is done, a computation, the executor has ended.
  std::condition_variable changed_;
  std::deque<slot> slots_;
  std::list<detail::job> queue_;      ///< of all models, in order of arrival
  std::list<detail::job> computing_;  ///< of which `done` alone is guarded
  clock::time_point gathering_until_ =
      clock::time_point::max();  ///< then a batch is not waited for any more
  std::uint64_t looks_ = 0;
  bool gathers_ = false;              ///< a model makes batches
  bool suspect_is_computed_ = false;  ///< and nothing beside it
  request_ticket last_ticket_ = 0;
  std::size_t samples_left_ = 0;         ///< of warm-ups
  std::vector<detail::answer> refused_;  ///< to be delivered by the timekeeper
  std::deque<host_snapshot::handover> handovers_;
  latency_window warm_, cold_;
  std::uint64_t requests_ = 0, failed_ = 0;
  detail::company company_;
  std::shared_ptr<compute_lease> const lease_;
  scheduler::parallelism parallelism_;
  scheduler::device_demands demands_;
  scheduler::joint_keeping shared_;
  bool memory_is_short_ = false;       ///< for what all models have chosen
  std::uint64_t largest_reserve_ = 0;  ///< the timekeeper's
  std::uint64_t cuts_ = 0;             ///< of pauses, that have been looked at
  std::vector<std::string> cut_short_models_;
  clock::time_point pause_end_;  ///< of a pause that nothing wants any more
  clock::time_point next_tick_, timekeeper_sleeps_until_;
  clock::time_point executor_sleeps_until_ = clock::time_point::min();  ///< the past: it is awake
  std::size_t soon_back_ = 0;   ///< of those who compute: they give answers, and look at the queue
  std::size_t more_lanes_ = 0;  ///< of callers that compute
  scheduler::reserve keeper_;   ///< the timekeeper's
  std::uint64_t kept_bytes_ = 0;
  std::uint64_t reserve_bytes_ = 0;               ///< the timekeeper's
  std::optional<memhandover::owed_memory> owed_;  ///< to jobs, as of the last look
  bool some_give_way_ = false;                    ///< models, for that
  clock::time_point next_gathering_{};            ///< of what is owed, from tenants
  bool is_needed_ = false;                        ///< something by a job, as of the last look
  clock::time_point next_needed_{};               ///< of that, from jobs of lower priority
  std::chrono::microseconds run_ahead_{0};        ///< as published; 0: not yet
  bool busy_ = false;                             ///< the executor loads or computes for a request
  bool loading_ = false;                          ///< of these, it loads
  /// What the executor is at that nobody waited for when it began: a load, or gathering what a job needs.
  struct spare_load {
    slot const* model = nullptr;  ///< of a load
    std::stop_source ends{};
  };
  std::optional<spare_load> prewarming_;
  bool keeps_warm_ = false;          ///< whatever is idle
  std::uint64_t learnt_events_ = 0;  ///< when what is known was last written down
  bool stopping_ = false;    ///< no more requests; the executor ends when the queue is empty
  bool taken_over_ = false;  ///< what a dead server has left has been looked at
  bool executed_ = false;    ///< the executor has ended and all memory is given back
  bool ended_ = false;       ///< the timekeeper ends
  bool timekeeper_called_ = false;

  std::vector<std::thread> computers_;  ///< if there are none, the executor computes
  std::thread executor_, timekeeper_;   ///< last: they use what stands above
};

}  // namespace sluice::server
