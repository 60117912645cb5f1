/// The examples in the headers of scheduler/, word for word: compiled, never run.
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "scheduler/admission.hpp"
#include "scheduler/agenda.hpp"
#include "scheduler/attainment.hpp"
#include "scheduler/batch_planner.hpp"
#include "scheduler/bursts.hpp"
#include "scheduler/calibration.hpp"
#include "scheduler/detail/interval_window.hpp"
#include "scheduler/device_demands.hpp"
#include "scheduler/distribution.hpp"
#include "scheduler/estimators.hpp"
#include "scheduler/eviction.hpp"
#include "scheduler/hold_choice.hpp"
#include "scheduler/joint_choice.hpp"
#include "scheduler/joint_keeping.hpp"
#include "scheduler/keep_warm.hpp"
#include "scheduler/model_controller.hpp"
#include "scheduler/parallelism.hpp"
#include "scheduler/parking_turns.hpp"
#include "scheduler/partial_warmth.hpp"
#include "scheduler/pause_budget.hpp"
#include "scheduler/periods.hpp"
#include "scheduler/placement.hpp"
#include "scheduler/queueing.hpp"
#include "scheduler/recomputation.hpp"
#include "scheduler/reserve.hpp"
#include "scheduler/retries.hpp"
#include "scheduler/run_ahead.hpp"
#include "scheduler/shared_executors.hpp"
#include "scheduler/shared_server.hpp"
#include "scheduler/warm_policy.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"

namespace sluice::scheduler::header_examples {

using namespace std::chrono_literals;

void of_admission(std::size_t models, instant now, instant deadline, std::uint64_t ticket,
                  admission::sight const& host) {
  admission front{models, admission::lines::one_for_each_model};
  auto const verdict = front.ask(0, now, deadline, host);
  if (verdict.admitted) {
    front.add(0, ticket, now, deadline, host);
  }
  // … its answer has come …
  front.on_answer(0, ticket, now);
}

void of_agenda(std::size_t models, instant now, std::function<instant(std::size_t)> const& decide) {
  agenda due{models};
  due.want(7);
  due.want_at(8, now + 30s);
  due.take(now, [&](std::size_t model) { due.want_at(model, decide(model)); });
}

void of_attainment(distribution const& service, distribution const& load) {
  attainment_model model{service, load, 200ms};
  auto at = model.at(/*arrivals_per_s=*/0.5);
  at.share_within(poisson_exceed(0.5, 30s));
}

void of_batch_planner(std::uint64_t remaining, std::uint64_t free_to_us, std::uint64_t bytes,
                      seconds took) {
  batch_planner planner{{.largest = 64}};
  while (remaining > 0) {
    auto next = planner.plan({.remaining_samples = remaining, .arena_bytes = free_to_us});
    if (next.wait) {
      continue;
    }
    planner.committed(next.samples, bytes, took);
    remaining -= next.samples;
  }
}

void of_bursts(distribution const& b) {
  switching_poisson stream{.rates_per_s = {18.0, 2.0}, .switches_per_s = {0.1, 0.1}};
  mean_wait(stream, 50ms);
  mean_wait_by_spread({.arrivals_per_s = 8.0, .service = b}, 4.0);
}

void of_estimators(instant start, instant now) {
  arrival_rates rates{start};
  rates.count(now);
  rates.slow(now);
}

void of_eviction() {
  std::vector<resident_model> const there{{.bytes = 4_GiB, .loss_per_s = 0.2},
                                          {.bytes = 2_GiB, .loss_per_s = 0.05}};
  models_to_release(there, 1_GiB);
}

void of_joint_choice() {
  std::vector<std::vector<kept_option>> const models{
      {{.held_bytes = 10e9, .loss_per_s = 0.0}, {.held_bytes = 1e9, .loss_per_s = 0.2}},
      {{.held_bytes = 6e9, .loss_per_s = 0.0}, {.held_bytes = 1e9, .loss_per_s = 0.4}}};
  auto const made = choose_together(models, 8e9);
  made.options;
}

void of_joint_keeping(model_report const& first, model_report const& second) {
  seconds idle_timer{};
  joint_keeping shared;
  auto const in_force = shared.share({{&first.warm, 9e9}, {&second.warm, 6e9}}, 12e9);
  idle_timer = in_force[0] ? in_force[0]->idle_timeout : first.warm.chosen.idle_timeout;
}

void of_retries(instant now) {
  retries again;
  again.on_refusal(retries::mark_of("order-17"), now, 2s);
  again.take(retries::mark_of("order-17"), now + 2s);
}

void of_what_estimators_keep(arrival_rates const& rates, instant now) {
  arrival_rates next{now};
  next.recall(rates.kept(now), 30s, now);
}

void of_distribution(std::vector<double> const& window) {
  auto service = distribution::gamma(100ms, 1.0);
  auto measured = distribution::of_samples(window);
  auto two_kinds =
      distribution::mixture({{.weight = 0.9, .mean = 20ms}, {.weight = 0.1, .mean = 200ms}});
}

void of_keep_warm(distribution const& gaps) {
  keep_warm_costs const costs{.per_held_s = 1.0, .per_load = 2.0};
  auto const best = cheapest_timeout(gaps, costs);
  best.idle_timeout;
}

void of_experience(model_controller& model, model_settings const& settings, instant now) {
  model_controller next{settings, now};
  next.recall(model.learnt(now), 30s, now);
}

void of_model_controller(objective const& slo, instant now,
                         std::function<void(seconds)> const& refuse, seconds load_time,
                         seconds handover_time, seconds service_time, seconds response_time,
                         seconds& idle_timer) {
  model_controller model{{.goal = slo, .weight_bytes = 90_MiB, .load = {.mean = 40ms}}, now};
  if (auto const answer = model.on_arrival(now); !answer.admitted) {
    refuse(answer.retry_after);
  }
  model.on_load(now, load_time, handover_time);
  model.on_service(now, service_time, response_time);
  idle_timer = model.tick(now).warm.chosen.idle_timeout;
}

void of_interval_window(detail::interval_window::time_point now) {
  using detail::interval_window;
  interval_window held{1s, 512};
  auto const longest = held.longest_from(now, 800ms);
  held.add({now, now + longest});
  held.first_with(100ms, 800ms);
}

void of_parking_turns(parking_turns::time_point now, std::chrono::nanoseconds coming,
                      std::chrono::nanoseconds swap) {
  parking_turns turns{{.share = 0.5, .window = 1min, .stay = 10}};
  turns.left(now);
  turns.owed_at(coming);
  turns.came_back(now, swap);
  turns.stays_until();
}

void of_partial_warmth() {
  partial_warmth chain{.arrivals_per_s = 1.75,
                       .service = 7.3ms,
                       .load = 14.3ms,
                       .idle_timeout = 5s,
                       .cold_share = 0.906};
  solve(chain, 29.2ms).share_within;
}

void of_pause_budget(pause_budget::time_point now, pause_budget::time_point ended) {
  pause_budget budget{0.2};
  if (auto const limit = budget.begin(now); limit > now) {
    budget.end(ended);
  } else {
  }
}

void of_periods(instant now, seconds load_time, instant& load_at) {
  period_estimator seen;
  seen.count(now);
  if (auto const bunch = seen.next(now)) {
    load_at = bunch->begins - load_time;
  }
}

void of_placement(distribution const& small, distribution const& large,
                  std::vector<placement_device> const& devices) {
  std::vector<placeable_model> const models{
      {.bytes = 4_GiB, .arrivals_per_s = 20.0, .service = small, .latency = 100ms},
      {.bytes = 30_GiB, .arrivals_per_s = 1.0, .service = large, .latency = 2s}};
  auto const found = place_by_attainment(models, devices, {});
  found.devices_of[0];
}

void of_queueing() {
  queue_load demand{.arrivals_per_s = 0.5,
                    .service = distribution::gamma(100ms, 1.0),
                    .load = distribution::gamma(2s, 0.0)};
  mean_wait(demand, poisson_exceed(0.5, 3s));
  cycle_of(demand, poisson_exceed(0.5, 3s)).released_fraction;
}

void of_parallelism() {
  parallelism models{4};
  models.add(7, 2.0, 30ms);  // model 7 has computed beside one other
  models.bound();            // so many at most from now on
}

void of_recomputation(std::uint64_t remaining, std::uint64_t free_to_us, std::uint64_t bytes,
                      seconds took) {
  recomputing_planner planner{{.largest = 64}, true};
  while (remaining > 0) {
    auto const [next, recompute] =
        planner.plan({.remaining_samples = remaining, .arena_bytes = free_to_us});
    if (next.wait) {
      continue;
    }
    planner.committed(recompute, next.samples, bytes, took);
    remaining -= next.samples;
  }
}

void of_reserve(std::uint64_t chunk_bytes, memhandover::serving_pool& pool,
                memhandover::pool_usage const& usage, std::uint64_t w) {
  reserve keeper{chunk_bytes};
  auto move = keeper.update({.free_bytes = usage.free_bytes, .size_bytes = w});
  pool.set_reserve(move.keep_bytes);
}

void of_hold_choice() {
  hold_choice after_requests{250us};
  after_requests.add(40us);  // a gap between work and the next
  after_requests.hold();
}

void of_run_ahead() {
  std::vector<run_ahead_promise> const promises{{.share = 0.99, .latency = 20ms, .service = 2ms}};
  run_ahead_bound(promises);
}

void of_calibration() {
  calibration seen{5min};
  seen.add(1s, 20, 11, 0.99);
  seen.corrected(0.99);
}

void of_shared_executors(distribution const& small, distribution const& large) {
  std::vector<shared_model> const models{{.arrivals_per_s = 20.0, .service = small},
                                         {.arrivals_per_s = 1.0, .service = large}};
  auto const beside = predict_together(models, {.at_once = 1});
  attainment_model{small, {}, 50ms, beside[0]}.at(20.0);
}

void of_device_demands(std::size_t models, std::vector<shared_model> const& demands,
                       model_controller& controller, instant now) {
  device_demands asked{now};
  asked.add(now, 20ms);  // a request was computed, whosever it was
  if (asked.has_moved(now, models)) {
    asked.predict(now, demands, {.at_once = 1});  // of all models, then decide for each of them
  }
  controller.tick(now, asked.beside(7));
}

void of_shared_server(distribution const& small, distribution const& large) {
  std::vector<request_class> const kinds{{.arrivals_per_s = 20.0, .service = small},
                                         {.arrivals_per_s = 1.0, .service = large}};
  mean_wait_in_turn(kinds);
  mean_waits_by_rank(kinds);
  concurrent_server device{.arrivals_per_s = 30.0, .service = 50ms, .slowdown = {1.0, 1.2}};
  waits_of(device).mean_response;
}

void of_warm_policy(objective const& slo) {
  auto decided = decide({.goal = slo,
                         .weight_bytes = 90_MiB,
                         .arrivals_per_s = 2.0,
                         .service = distribution::gamma(20ms, 1.0),
                         .load = distribution::gamma(1s, 0.0)});
  decided.chosen.idle_timeout;
}

}  // namespace sluice::scheduler::header_examples

#pragma GCC diagnostic pop
