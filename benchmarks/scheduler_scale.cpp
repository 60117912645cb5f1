/// What the scheduler's ticks take with many models, and what the simulator takes for a request. One thread; one JSON object on
/// standard output.
///
/// `ticks`: requests come to the models by Zipf's distribution, as a Poisson process; each event goes to its model's controller, and
/// once a second of the played time there is a tick: new decisions for the models that need one, and the size of the reserve. Ticks
/// are timed by the processor's time of the thread, after a warm-up; events are timed together.
///
/// `simulator`: plays a trace that lies in memory to one policy. `memory`: the most bytes that the simulator had in use, which is
/// counted where they are allocated, for a number of models, and for a number of requests that all are there at once.
///
/// `placement`: places models over devices by attainment, round robin and first fit, and plays a trace to each placement.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <new>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/placing.hpp"
#include "runtime/simulator/replicas.hpp"
#include "runtime/simulator/simulation.hpp"
#include "scheduler/agenda.hpp"
#include "scheduler/model_controller.hpp"
#include "scheduler/placement.hpp"
#include "scheduler/reserve.hpp"

namespace {

// One thread allocates.
std::size_t bytes_in_use = 0;
std::size_t most_bytes_in_use = 0;
constexpr std::size_t header = alignof(std::max_align_t);

}  // namespace

void* operator new(std::size_t size) {
  auto* const made = static_cast<std::byte*>(std::malloc(size + header));
  if (made == nullptr) {
    throw std::bad_alloc{};
  }
  *reinterpret_cast<std::size_t*>(made) = size;
  bytes_in_use += size;
  most_bytes_in_use = std::max(most_bytes_in_use, bytes_in_use);
  return made + header;
}

void operator delete(void* given) noexcept {
  if (given != nullptr) {
    auto* const made = static_cast<std::byte*>(given) - header;
    bytes_in_use -= *reinterpret_cast<std::size_t*>(made);
    std::free(made);
  }
}

void operator delete(void* given, std::size_t) noexcept {
  ::operator delete(given);
}

namespace {

using namespace sluice;
using namespace std::chrono_literals;
using nlohmann::json;
using scheduler::instant;
using scheduler::seconds;

struct settings {
  std::string part = "ticks";
  std::string policy = "fixed:60s";
  std::size_t models = 10'000;
  double rate_per_model = 0.05;
  double zipf = 1.0;
  double warm_up_s = 300.0;
  double length_s = 600.0;
  std::size_t requests = 4'000'000;
  std::size_t devices = 8;
  double utilisation = 0.6;
  std::uint64_t seed = 1;
};

/// Of this thread: what else the machine does is not counted.
double processor_us() {
  timespec now{};
  (void)::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

double us_since(double begin) {
  return processor_us() - begin;
}

scheduler::objective promise() {
  return {.percentile = 0.95, .latency = 200ms, .attainment = 0.95, .window = 5min};
}

class many_models {
 public:
  explicit many_models(settings const& how) : how_(how), random_(how.seed), agenda_(how.models) {
    std::vector<double> weights;
    for (std::size_t i = 0; i < how.models; ++i) {
      controllers_.emplace_back(
          scheduler::model_settings{
              .goal = promise(), .weight_bytes = weight_bytes, .load = {.mean = 100ms}},
          instant{});
      weights.push_back(1.0 / std::pow(static_cast<double>(i + 1), how.zipf));
      agenda_.want(i);
    }
    popularity_ = std::discrete_distribution<std::size_t>{weights.begin(), weights.end()};
    reports_.resize(how.models);
    tick(instant{});
  }

  json run() {
    std::vector<double> tick_us;
    double events_us = 0.0;
    std::size_t decisions = 0;
    std::size_t events = 0;
    std::exponential_distribution<double> gap{how_.rate_per_model *
                                              static_cast<double>(how_.models)};
    std::exponential_distribution<double> service{1.0 / 0.02};
    double next_s = gap(random_);
    for (double now_s = 1.0; now_s <= how_.warm_up_s + how_.length_s; now_s += 1.0) {
      arrivals_.clear();
      for (; next_s < now_s; next_s += gap(random_)) {
        arrivals_.push_back({next_s, service(random_), popularity_(random_)});
      }
      auto const begin = processor_us();
      for (auto const& each : arrivals_) {
        play(each);
      }
      auto const played_us = us_since(begin);
      auto const tick_begin = processor_us();
      auto const decided = tick(instant{seconds{now_s}});
      auto const took_us = us_since(tick_begin);
      if (now_s > how_.warm_up_s) {
        tick_us.push_back(took_us);
        events_us += played_us;
        events += arrivals_.size();
        decisions += decided;
      }
    }
    auto const ticks = static_cast<double>(tick_us.size());
    return {{"tick_us", tick_us},
            {"decisions_per_tick", static_cast<double>(decisions) / ticks},
            {"request_us", events_us / static_cast<double>(std::max<std::size_t>(events, 1))},
            {"bytes_per_model",
             static_cast<double>(most_bytes_in_use) / static_cast<double>(how_.models)}};
  }

 private:
  static constexpr std::uint64_t weight_bytes = 1U << 30U;
  struct request {
    double at_s;
    double service_s;
    std::size_t model;
  };
  struct last_report {
    scheduler::cold_model cold;
  };

  void play(request const& it) {
    auto& its = controllers_[it.model];
    (void)its.on_arrival(instant{seconds{it.at_s}});
    its.on_service(instant{seconds{it.at_s}}, seconds{it.service_s}, seconds{it.service_s});
    if (its.has_news()) {
      agenda_.want(it.model);
    }
  }

  std::size_t tick(instant now) {
    auto const count = agenda_.take(now, [&](std::size_t model) {
      reports_[model].cold =
          scheduler::cold_model_of(controllers_[model].tick(now).warm, weight_bytes);
      agenda_.want_at(model, controllers_[model].due());
    });
    cold_.clear();
    for (auto const& each : reports_) {
      cold_.push_back(each.cold);
    }
    reserve_ = scheduler::reserve_size(cold_, 64 * weight_bytes);
    return count;
  }

  settings how_;
  std::mt19937_64 random_;
  scheduler::agenda agenda_;
  std::vector<scheduler::model_controller> controllers_;
  std::vector<last_report> reports_;
  std::vector<scheduler::cold_model> cold_;
  std::vector<request> arrivals_;
  std::discrete_distribution<std::size_t> popularity_;
  std::uint64_t reserve_ = 0;
};

std::vector<simulator::simulated_model> simulated(std::size_t models) {
  return std::vector<simulator::simulated_model>(
      models, {.bytes = 1U << 30U, .goal = promise(), .device = 0});
}

simulator::simulation_outcome simulated_run(std::string const& policy,
                                            simulator::trace const& requests) {
  auto const models = simulated(requests.models.size());
  auto const keeping = simulator::make_keeping(
      policy, {.models = &models, .requests = &requests, .memory_bytes = {64ULL << 30U}});
  return simulator::simulate(requests, models, *keeping, {});
}

json time_simulator(settings const& how) {
  constexpr double rate_per_s = 100.0;
  auto const requests = simulator::generate(
      "poisson:rate=100,zipf=1.0", {.length_s = static_cast<double>(how.requests) / rate_per_s,
                                    .models = static_cast<std::uint32_t>(how.models),
                                    .service_s = 0.005,
                                    .seed = how.seed});
  auto const begin = processor_us();
  auto const seen = simulated_run(how.policy, requests);
  auto const took_us = us_since(begin);
  return {{"requests", requests.requests.size()},
          {"requests_per_s", 1e6 * static_cast<double>(requests.requests.size()) / took_us},
          {"loads", seen.all().loads}};
}

/// The most bytes that a simulation of so many requests, which all come at once to so many models, has in use besides the trace.
double most_bytes(std::string const& policy, std::size_t models, std::size_t at_once) {
  simulator::trace requests;
  requests.models.resize(models, "model");
  for (std::size_t i = 0; i < at_once; ++i) {
    requests.requests.push_back({0.0, 0.001, static_cast<std::uint32_t>(i % models)});
  }
  requests.length_s = 1.0;
  auto const before = bytes_in_use;
  most_bytes_in_use = bytes_in_use;
  (void)simulated_run(policy, requests);
  return static_cast<double>(most_bytes_in_use - before);
}

json memory(settings const& how) {
  constexpr std::size_t few = 1U << 12U;  // powers of two: vectors are as large as they have to be
  constexpr std::size_t many = 1U << 16U;
  auto const slope = [](double less, double more) {
    return (more - less) / static_cast<double>(many - few);
  };
  return {{"bytes_per_model",
           slope(most_bytes(how.policy, few, few), most_bytes(how.policy, many, few))},
          {"bytes_per_request",
           slope(most_bytes(how.policy, 1, few), most_bytes(how.policy, 1, many))}};
}

/// Sizes from 1 to 8 GiB in turn, requests by Zipf's distribution; of devices that have a fifth more memory than all models need.
json placements(settings const& how) {
  constexpr double service_s = 0.05;
  double const rate_per_s = how.utilisation * static_cast<double>(how.devices) / service_s;
  auto const requests = simulator::generate(
      "poisson:rate=" + std::to_string(rate_per_s) + ",zipf=" + std::to_string(how.zipf),
      {.length_s = static_cast<double>(how.requests) / rate_per_s,
       .models = static_cast<std::uint32_t>(how.models),
       .service_s = service_s,
       .service_scv = 1.0,
       .seed = how.seed});
  std::vector<std::uint64_t> bytes;
  std::uint64_t all = 0;
  for (std::size_t i = 0; i < how.models; ++i) {
    bytes.push_back((1 + i % 8) << 30U);
    all += bytes.back();
  }
  std::vector<scheduler::placement_device> const devices(
      how.devices, {(all + all / 5) / how.devices + (8ULL << 30U)});
  auto const models = simulator::placeable_models(requests, {.bytes = bytes, .latency = 400ms});
  json said{{"requests", requests.requests.size()}};
  for (std::string const rule : {"attainment", "round-robin", "first-fit", "work"}) {
    auto const begin = processor_us();
    auto const found =
        simulator::place(requests, models, devices, simulator::parse_placing(rule), {});
    auto const took_us = us_since(begin);
    auto const there = simulator::spread(requests, found.devices_of, {.seed = how.seed});
    auto const replicas = simulator::replicas_of(models, there, {.latency = 400ms});
    auto const count = static_cast<unsigned>(how.devices);
    auto const policy = simulator::make_keeping(
        "always", {.models = &replicas, .requests = &there.requests, .devices = count});
    auto const seen = simulator::gathered(
        simulator::simulate(there.requests, replicas, *policy, {.devices = count}), there);
    said[rule] = {{"placement_s", 1e-6 * took_us},
                  {"replicas", replicas.size()},
                  {"left_out", found.left_out.size()},
                  {"predicted_percent",
                   100.0 * scheduler::predict_placement(models, devices, found, {}).share_within},
                  {"in_time_percent", 100.0 * seen.in_time()}};
  }
  return said;
}

json run(settings const& how) {
  if (how.part == "ticks") {
    return many_models{how}.run();
  }
  if (how.part == "placement") {
    return placements(how);
  }
  return how.part == "simulator" ? time_simulator(how) : memory(how);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times the scheduler's ticks, the simulator, or placements"};
  settings how;
  app.add_option("--part", how.part)
      ->check(CLI::IsMember({"ticks", "simulator", "memory", "placement"}));
  app.add_option("--policy", how.policy, "of the simulator");
  app.add_option("--models", how.models);
  app.add_option("--rate-per-model", how.rate_per_model, "requests per second");
  app.add_option("--zipf", how.zipf, "exponent of the popularity distribution");
  app.add_option("--warm-up-s", how.warm_up_s, "of the played time");
  app.add_option("--length-s", how.length_s, "of the played time, after that");
  app.add_option("--requests", how.requests, "of the simulator");
  app.add_option("--devices", how.devices, "of a placement")->check(CLI::Range(1, 4096));
  app.add_option("--utilisation", how.utilisation, "of them")->check(CLI::Range(0.0, 10.0));
  app.add_option("--seed", how.seed);
  CLI11_PARSE(app, argc, argv);
  try {
    std::printf("%s\n", run(how).dump().c_str());
    return 0;
  } catch (std::exception const& why) {
    std::fprintf(stderr, "sluice-bench-scheduler-scale: %s\n", why.what());
    return 1;
  }
}
