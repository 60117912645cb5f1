// Holds the formulas of scheduler/ against the simulator: twenty runs of seeds of their own each, and the formula in the interval in
// which their mean lies in 999 of 1000 cases (Student's t of 19 degrees of freedom). Seeds are fixed, so that a test that passes does so always.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/simulator/forecasts.hpp"
#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/keeping.hpp"
#include "runtime/simulator/simulation.hpp"
#include "scheduler/attainment.hpp"
#include "scheduler/bursts.hpp"
#include "scheduler/partial_warmth.hpp"
#include "scheduler/queueing.hpp"
#include "scheduler/shared_server.hpp"

namespace sluice::simulator {
namespace {

using scheduler::distribution;
using scheduler::seconds;

constexpr int runs = 20;
constexpr double t_999 = 3.883;

struct case_of_one {
  std::string arrivals;
  double service_s = 0.1;
  double service_scv = 1.0;
  double length_s = 20'000.0;
  double latency_s = 0.5;
  simulation_settings settings{};
  std::function<void(trace&, std::uint64_t seed)> change{};  ///< what comes
  unsigned models = 1;
  unsigned instances = 1;
};

using measure = std::function<double(simulation_outcome const&)>;
using keeping_maker = std::function<std::unique_ptr<keeping>(keeping_inputs const&, int run)>;

keeping_maker named(std::string const& policy) {
  return [policy](keeping_inputs const& of, int) { return make_keeping(policy, of); };
}

/// Each measure's mean is where its formula says.
void expect_formulas(case_of_one const& it, keeping_maker const& make,
                     std::vector<std::pair<measure, double>> const& all) {
  std::vector<std::vector<double>> seen(all.size());
  for (int i = 1; i <= runs; ++i) {
    auto requests = generate(it.arrivals, {.length_s = it.length_s,
                                           .models = it.models,
                                           .service_s = it.service_s,
                                           .service_scv = it.service_scv,
                                           .seed = static_cast<std::uint64_t>(i)});
    if (it.change) {
      it.change(requests, static_cast<std::uint64_t>(1000 + i));  // independent of arrivals
    }
    std::vector<simulated_model> const models(
        it.models,
        {.bytes = 1, .goal = {.latency = seconds{it.latency_s}}, .instances = it.instances});
    auto settings = it.settings;
    settings.seed = static_cast<std::uint64_t>(100 + i);
    settings.count_from_s = 0.05 * it.length_s;
    keeping_inputs const of{.models = &models, .requests = &requests, .costs = settings.costs};
    auto const policy = make(of, i);
    auto const outcome = simulate(requests, models, *policy, settings);
    for (std::size_t m = 0; m < all.size(); ++m) {
      seen[m].push_back(all[m].first(outcome));
    }
  }
  for (std::size_t m = 0; m < all.size(); ++m) {
    double mean = 0.0, square = 0.0;
    for (double const each : seen[m]) {
      mean += each / runs;
    }
    for (double const each : seen[m]) {
      square += (each - mean) * (each - mean) / (runs - 1);
    }
    double const interval = t_999 * std::sqrt(square / runs);
    EXPECT_NEAR(mean, all[m].second, interval) << "measure " << m;
    EXPECT_LT(interval, 0.1 * std::abs(all[m].second) + 0.01) << "measure " << m << " says little";
  }
}

double wait(simulation_outcome const& seen) {
  auto const all = seen.all();
  return all.waits_s / static_cast<double>(all.answered);
}
double in_time(simulation_outcome const& seen) {
  return seen.in_time();
}
double released(simulation_outcome const& seen) {
  return seen.released_share();
}
double cold(simulation_outcome const& seen) {
  auto const all = seen.all();
  return static_cast<double>(all.cold) / static_cast<double>(all.requests);
}

/// A load that takes `mean_s`, whatever the model.
simulation_settings with_load(double mean_s, double scv, double release_s = 0.0) {
  simulation_settings settings;
  settings.costs.bytes_per_s = 1e30;
  settings.costs.fixed_s = mean_s;
  settings.costs.fixed_scv = scv;
  settings.release_s = release_s;
  return settings;
}

TEST(simulated, mm1_and_md1_wait_by_pollaczek_khinchine) {
  for (double const scv : {1.0, 0.0, 3.0}) {
    scheduler::queue_load const demand{.arrivals_per_s = 8.0,
                                       .service = distribution::gamma(seconds{0.1}, scv)};
    scheduler::attainment_model const model{demand.service, {}, seconds{0.5}};
    expect_formulas({.arrivals = "poisson:rate=8", .service_scv = scv}, named("always"),
                    {{wait, scheduler::mean_warm_wait(demand).count()},
                     {in_time, model.at(8.0).share_within(0.0)},
                     {released, 0.0}});
  }
}

TEST(simulated, services_of_two_kinds_wait_by_their_second_moment) {
  auto const two = [](double short_s, double long_s, bool exponential) {
    return [=](trace& it, std::uint64_t seed) {
      draws random{seed};
      for (auto& each : it.requests) {
        double const mean = random.uniform() < 0.1 ? long_s : short_s;
        each.service_s = exponential ? random.exponential(mean) : mean;
      }
    };
  };
  expect_formulas({.arrivals = "poisson:rate=10", .change = two(0.02, 0.2, true)}, named("always"),
                  {{wait, 0.070323}});
  expect_formulas({.arrivals = "poisson:rate=5", .change = two(0.05, 0.5, false)}, named("always"),
                  {{wait, 0.129762}});
}

TEST(simulated, loads_after_an_idle_timeout_make_the_known_waits) {
  case_of_one rare{.arrivals = "poisson:rate=0.5", .length_s = 60'000.0};
  rare.settings = with_load(2.0, 0.0);
  expect_formulas(rare, named("cold"), {{wait, 1.505263}, {released, 0.475}});
  scheduler::attainment_model const model{distribution::gamma(seconds{0.1}, 1.0),
                                          distribution::gamma(seconds{2.0}, 0.0), seconds{0.5}};
  double const p = scheduler::poisson_exceed(0.5, seconds{3.0});
  expect_formulas(rare, named("fixed:3s"),
                  {{wait, 0.552540},
                   {released, 0.173304},
                   {cold, 0.346608},
                   {in_time, model.at(0.5).share_within(p)}});
  rare.settings = with_load(2.0, 1.0);
  expect_formulas(rare, named("fixed:3s"), {{wait, 0.734965}});
}

TEST(simulated, releases_that_take_their_time_make_the_known_waits) {
  case_of_one rare{.arrivals = "poisson:rate=0.5", .length_s = 60'000.0};
  rare.settings = with_load(2.0, 0.0, 1.0);
  expect_formulas(rare, named("fixed:3s"), {{wait, 0.624971}, {released, 1.0 - 0.896890}});
}

TEST(simulated, a_stream_of_two_rates_waits_by_the_matrix_geometric_solution) {
  expect_formulas(
      {.arrivals = "mmpp:rates=18/2,switches=0.1/0.1", .service_s = 0.05, .length_s = 40'000.0},
      named("always"), {{wait, 0.298954}});
}

TEST(simulated, computations_at_once_wait_by_birth_and_death) {
  for (std::vector<double> const& slowdown :
       {std::vector{1.0, 1.0, 1.0}, std::vector{1.0, 1.3, 1.7}, std::vector{1.0, 2.0, 3.0}}) {
    case_of_one device{.arrivals = "poisson:rate=8", .instances = 3};
    device.settings.parallel = 3;
    device.settings.slowdown = slowdown;
    auto const waits =
        scheduler::waits_of({.arrivals_per_s = 8.0, .service = seconds{0.1}, .slowdown = slowdown});
    expect_formulas(device, named("always"), {{wait, waits.mean_response.count() - 0.1}});
  }
}

TEST(simulated, several_models_on_one_device_wait_as_classes_in_turn) {
  // The second is asked for as often, and takes ten times as long.
  auto const longer = [](trace& it, std::uint64_t) {
    for (auto& each : it.requests) {
      each.service_s *= each.model == 1 ? 10.0 : 1.0;
    }
  };
  std::vector<scheduler::request_class> const kinds{
      {.arrivals_per_s = 3.0, .service = distribution::gamma(seconds{0.02}, 1.0)},
      {.arrivals_per_s = 3.0, .service = distribution::gamma(seconds{0.2}, 1.0)}};
  auto const share = [&kinds](std::size_t i) {
    auto const all = scheduler::all_of(kinds);
    return scheduler::attainment_model{
        kinds[i].service,
        {},
        seconds{0.5},
        {.by = scheduler::predicted_by::classes_in_turn,
         .arrivals_per_s = all.arrivals_per_s,
         .service = std::make_shared<distribution const>(all.service),
         .own_per_s = kinds[i].arrivals_per_s}}
        .at(kinds[i].arrivals_per_s)
        .share_within(0.0);
  };
  auto const of_model = [](std::size_t i) {
    return [i](simulation_outcome const& seen) {
      return static_cast<double>(seen.models[i].within) /
             static_cast<double>(seen.models[i].requests);
    };
  };
  expect_formulas({.arrivals = "poisson:rate=6", .service_s = 0.02, .change = longer, .models = 2},
                  named("always"),
                  {{wait, scheduler::mean_wait_in_turn(kinds).count()},
                   {of_model(0), share(0)},
                   {of_model(1), share(1)}});
}

/// As Sirius' chain has it: exponential timeouts, behind which a share stays.
class chain_keeping final : public keeping {
 public:
  chain_keeping(double timeout_s, double cold_share, int run)
      : timeout_s_(timeout_s),
        cold_share_(cold_share),
        random_(static_cast<unsigned>(5000 + run)) {}
  double idle_timeout(model_number /*model*/, double /*idle_since_s*/, double /*now_s*/) override {
    return random_.exponential(timeout_s_);
  }
  void on_idle_end(model_number model, std::vector<model_number>& go) override {
    if (random_.uniform() < cold_share_) {
      go.push_back(model);
    }
  }

 private:
  double timeout_s_, cold_share_;
  draws random_;
};

TEST(simulated, partly_warm_models_answer_in_time_as_sirius_chain_says) {
  auto const check = [](double rate, double service_s, double load_s, double timeout_s,
                        double cold_share, double latency_s, double length_s) {
    case_of_one it{.arrivals = "poisson:rate=" + std::to_string(rate),
                   .service_s = service_s,
                   .length_s = length_s,
                   .latency_s = latency_s};
    it.settings = with_load(load_s, 1.0);
    auto const solved = scheduler::solve({.arrivals_per_s = rate,
                                          .service = seconds{service_s},
                                          .load = seconds{load_s},
                                          .idle_timeout = seconds{timeout_s},
                                          .cold_share = cold_share},
                                         seconds{latency_s});
    auto const make = [=](keeping_inputs const&, int run) {
      return std::make_unique<chain_keeping>(timeout_s, cold_share, run);
    };
    expect_formulas(
        it, make,
        {{in_time, solved.share_within}, {wait, solved.mean_response.count() - service_s}});
  };
  double const share = 1.0 - 0.09385311;
  double const load = 0.0098 + share * 0.005;
  check(98.2 / 56.0, 0.0073, load, 5.0, share, 0.0292, 10'000.0);
  check(3.5 / 56.0, 0.0073, load, 5.0, share, 0.0292, 200'000.0);
  check(60.0, 0.0073, 0.1, 0.02, 0.5, 0.15, 1'000.0);  // where a wrong rate in the chain would show
}

TEST(forecasts, say_which_formula_they_are_by) {
  auto const requests = generate("poisson:rate=4", {.length_s = 4'000.0, .service_s = 0.1});
  std::vector<simulated_model> const models{{.bytes = 1, .goal = {.latency = seconds{0.5}}}};
  auto settings = with_load(2.0, 0.0);
  auto const of = [&](std::string const& policy, std::string const& stream) {
    return forecast_of(requests, models, policy, stream, settings);
  };
  EXPECT_EQ(of("always", "poisson:rate=4").by, "M/G/1, MMPP/M/1");
  EXPECT_NEAR(*of("always", "poisson:rate=4").mean_wait_s, 0.4 / 0.6 * 0.1, 0.01);
  EXPECT_EQ(of("always", "trace.csv").by, "M/G/1, spread of gaps");
  EXPECT_EQ(of("fixed:3s", "trace.csv").by, "M/G/1 with set-up");
  EXPECT_EQ(of("sirius", "trace.csv").by, "Sirius' chain");
  EXPECT_EQ(of("ours", "trace.csv").by, "");
  EXPECT_EQ(of("wild", "trace.csv").by, "");
  settings.parallel = 2;
  EXPECT_EQ(of("sirius", "trace.csv").by, "");
}

TEST(forecasts, of_several_models_are_classes_only_where_they_share_a_device) {
  auto const requests =
      generate("poisson:rate=4", {.length_s = 1'000.0, .models = 2, .service_s = 0.1});
  std::vector<simulated_model> models(2, {.bytes = 1, .goal = {.latency = seconds{0.5}}});
  simulation_settings settings{.devices = 2};
  EXPECT_EQ(forecast_of(requests, models, "always", "", settings).by, "classes in turn");
  EXPECT_EQ(forecast_of(requests, models, "fixed:3s", "", settings).by, "");
  models[1].device = 1;
  EXPECT_EQ(forecast_of(requests, models, "fixed:3s", "", settings).by, "M/G/1 with set-up");
}

}  // namespace
}  // namespace sluice::simulator
