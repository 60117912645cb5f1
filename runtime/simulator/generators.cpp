#include "runtime/simulator/generators.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <numbers>
#include <string_view>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/base/numbers.hpp"
#include "runtime/simulator/draws.hpp"
#include "runtime/simulator/model_shares.hpp"

namespace sluice::simulator {
namespace {

[[noreturn]] void refuse(std::string const& why) {
  throw error{error_kind::invalid_argument, why};
}

/// A process's parameters, each with its numbers.
class process_parameters {
 public:
  process_parameters(std::string_view process, std::string_view text) : process_(process) {
    while (!text.empty()) {
      auto const comma = text.find(',');
      add(text.substr(0, comma));
      text = comma == std::string_view::npos ? "" : text.substr(comma + 1);
    }
  }

  [[nodiscard]] double one(std::string const& name, double least, double most) const {
    return several(name, 1, least, most).front();
  }
  [[nodiscard]] std::array<double, 2> two(std::string const& name, double least) const {
    auto const found = several(name, 2, least, most_per_s);
    return {found[0], found[1]};
  }
  [[nodiscard]] double one_or(std::string const& name, double otherwise) const {
    return numbers_.contains(name) ? one(name, 0.0, most_per_s) : otherwise;
  }
  void check_names(std::vector<std::string> known) const {
    known.emplace_back("zipf");
    for (auto const& [name, numbers] : numbers_) {
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        refuse(fmt::format("{} has no parameter '{}'; it has {}", process_, name,
                           fmt::join(known, ", ")));
      }
    }
  }

  static constexpr double most_per_s = 1e7;

 private:
  void add(std::string_view text) {
    auto const equals = text.find('=');
    if (equals == std::string_view::npos) {
      refuse(fmt::format("'{}' of {} must be a name and a number, such as rate=2", text, process_));
    }
    std::vector<double> numbers;
    for (auto rest = text.substr(equals + 1);;) {
      auto const slash = rest.find('/');
      auto const word = rest.substr(0, slash);
      auto const value = parse_number<double>(word);
      if (!value || !std::isfinite(*value)) {
        refuse(fmt::format("'{}' in '{}' of {} is no number", word, text, process_));
      }
      numbers.push_back(*value);
      if (slash == std::string_view::npos) {
        break;
      }
      rest = rest.substr(slash + 1);
    }
    if (!numbers_.emplace(text.substr(0, equals), std::move(numbers)).second) {
      refuse(fmt::format("'{}' of {} is there twice", text.substr(0, equals), process_));
    }
  }

  [[nodiscard]] std::vector<double> several(std::string const& name, std::size_t count,
                                            double least, double most) const {
    auto const found = numbers_.find(name);
    if (found == numbers_.end() || found->second.size() != count) {
      refuse(fmt::format("{} needs {}= with {}", process_, name,
                         count == 1 ? "a number" : "two numbers, such as 18/2"));
    }
    for (double const each : found->second) {
      if (!(each >= least && each <= most)) {
        refuse(fmt::format("{} of {} is {:g}, must be from {:g} to {:g}", name, process_, each,
                           least, most));
      }
    }
    return found->second;
  }

  std::string_view process_;
  std::map<std::string, std::vector<double>, std::less<>> numbers_;
};

constexpr double least_rate = 1e-9;

double rate_of(process_parameters const& with) {
  return with.one("rate", least_rate, process_parameters::most_per_s);
}

/// Of a model of its own, or of whichever.
using arrive = std::function<void(double at_s, std::optional<std::uint32_t> model)>;
struct process_extent {
  double length_s;
  std::uint32_t models;
};
using process = void (*)(process_parameters const&, process_extent const&, draws&, arrive const&);

void poisson(process_parameters const& with, process_extent const& of, draws& random,
             arrive const& one) {
  with.check_names({"rate"});
  double const gap = 1.0 / rate_of(with);
  for (double t = random.exponential(gap); t < of.length_s; t += random.exponential(gap)) {
    one(t, std::nullopt);
  }
}

void log_normal_gaps(process_parameters const& with, process_extent const& of, draws& random,
                     arrive const& one) {
  with.check_names({"rate", "scv"});
  double const gap = 1.0 / rate_of(with);
  double const scv = with.one("scv", 0.0, 1e6);
  for (double t = random.log_normal(gap, scv); t < of.length_s; t += random.log_normal(gap, scv)) {
    one(t, std::nullopt);
  }
}

scheduler::switching_poisson switching(process_parameters const& with) {
  with.check_names({"rates", "switches"});
  return {.rates_per_s = with.two("rates", 0.0), .switches_per_s = with.two("switches", 1e-9)};
}

void mmpp(process_parameters const& with, process_extent const& of, draws& random,
          arrive const& one) {
  auto const stream = switching(with);
  double const first_share =
      stream.switches_per_s[1] / (stream.switches_per_s[0] + stream.switches_per_s[1]);
  std::size_t state = random.uniform() < first_share ? 0 : 1;
  for (double begin = 0.0; begin < of.length_s; state = 1 - state) {
    double const end =
        std::min(of.length_s, begin + random.exponential(1.0 / stream.switches_per_s[state]));
    double const rate = stream.rates_per_s[state];
    for (double t = begin; rate > 0.0;) {
      t += random.exponential(1.0 / rate);
      if (t >= end) {
        break;
      }
      one(t, std::nullopt);
    }
    begin = end;
  }
}

// Ogata, IEEE Transactions on Information Theory 27 (1981): thinning, at the intensity right after the last arrival, since it only falls.
void hawkes(process_parameters const& with, process_extent const& of, draws& random,
            arrive const& one) {
  with.check_names({"rate", "branching", "decay"});
  double const branching = with.one("branching", 0.0, 0.999);
  double const decay = with.one("decay", 1e-6, 1e6);
  double const base = rate_of(with) * (1.0 - branching);
  double excited = 0.0;  // intensity above the base
  for (double t = 0.0;;) {
    double const most = base + excited;
    double const gap = random.exponential(1.0 / most);
    t += gap;
    if (t >= of.length_s) {
      return;
    }
    excited *= std::exp(-decay * gap);
    if (random.uniform() * most <= base + excited) {
      one(t, std::nullopt);
      excited += branching * decay;
    }
  }
}

void diurnal(process_parameters const& with, process_extent const& of, draws& random,
             arrive const& one) {
  with.check_names({"rate", "swing", "period"});
  double const rate = rate_of(with);
  double const swing = with.one("swing", 0.0, 1.0);
  double const period = with.one("period", 1e-3, 1e9);
  double const most = rate * (1.0 + swing);
  for (double t = random.exponential(1.0 / most); t < of.length_s;
       t += random.exponential(1.0 / most)) {
    double const now = rate * (1.0 + swing * std::sin(2.0 * std::numbers::pi * t / period));
    if (random.uniform() * most <= now) {
      one(t, std::nullopt);
    }
  }
}

// Each model has a phase of its own.
void periodic(process_parameters const& with, process_extent const& of, draws& random,
              arrive const& one) {
  with.check_names({"period", "jitter", "bunch", "spread", "missed"});
  if (with.one_or("zipf", 0.0) > 0.0) {
    refuse("zipf of periodic: each model has its own bunches, and all have as many");
  }
  double const period = with.one("period", 1e-3, 1e9);
  double const jitter = with.one_or("jitter", 0.0);
  double const spread = with.one_or("spread", 0.0);
  double const missed = with.one_or("missed", 0.0);
  double const bunch = with.one_or("bunch", 1.0);
  if (jitter + spread >= period) {
    refuse(
        fmt::format("jitter and spread of periodic are {:g} s, must be below the period of {:g} s",
                    jitter + spread, period));
  }
  if (!(bunch >= 1.0) || bunch != std::floor(bunch)) {
    refuse(fmt::format("bunch of periodic is {:g}, must be a whole number from 1 on", bunch));
  }
  if (missed >= 1.0) {
    refuse(fmt::format("missed of periodic is {:g}, must be below 1", missed));
  }
  for (std::uint32_t model = 0; model < of.models; ++model) {
    double const phase = random.uniform() * period;
    for (double due = phase; due < of.length_s; due += period) {
      double const begin = due + jitter * (2.0 * random.uniform() - 1.0);
      bool const is_missed = random.uniform() < missed;
      for (double i = 0.0; i < bunch && !is_missed; i += 1.0) {
        double const at = i == 0.0 ? begin : begin + spread * random.uniform();
        if (at >= 0.0 && at < of.length_s) {
          one(at, model);
        }
      }
    }
  }
}

constexpr std::array<std::pair<std::string_view, process>, 6> processes{{
    {"poisson", poisson},
    {"mmpp", mmpp},
    {"hawkes", hawkes},
    {"lognormal", log_normal_gaps},
    {"diurnal", diurnal},
    {"periodic", periodic},
}};

std::pair<std::string_view, std::string_view> name_and_rest(std::string_view description) {
  auto const colon = description.find(':');
  return {description.substr(0, colon),
          colon == std::string_view::npos ? "" : description.substr(colon + 1)};
}

process process_of(std::string_view name) {
  auto const found = std::find_if(processes.begin(), processes.end(),
                                  [name](auto const& each) { return each.first == name; });
  return found == processes.end() ? nullptr : found->second;
}

}  // namespace

bool names_process(std::string const& text) {
  return text.find(':') != std::string::npos && process_of(name_and_rest(text).first) != nullptr;
}

trace generate(std::string const& description, generated_requests const& of) {
  auto const [name, rest] = name_and_rest(description);
  auto const run = process_of(name);
  if (run == nullptr) {
    refuse(
        fmt::format("there is no process '{}'; there are poisson, mmpp, hawkes, lognormal, diurnal "
                    "and periodic",
                    name));
  }
  if (!(of.length_s > 0.0) || !std::isfinite(of.length_s)) {
    refuse(fmt::format("the length is {} s, must be more than 0", of.length_s));
  }
  process_parameters const with{name, rest};
  model_shares const shares{of.models, with.one_or("zipf", 0.0)};
  // Services of their own seed: the same arrivals for whichever services.
  draws arrivals{of.seed}, services{of.seed ^ 0x9E3779B97F4A7C15ULL};
  trace made{.models = {}, .requests = {}, .length_s = of.length_s};
  for (std::uint32_t i = 0; i < of.models; ++i) {
    made.models.push_back(fmt::format("m{}", i));
  }
  run(with, {of.length_s, of.models}, arrivals, [&](double at, std::optional<std::uint32_t> model) {
    double const service_s = services.gamma(of.service_s, of.service_scv);
    made.requests.push_back(
        {.at_s = at, .service_s = service_s, .model = model ? *model : shares.draw(services)});
  });
  std::stable_sort(made.requests.begin(), made.requests.end(),
                   [](auto const& a, auto const& b) { return a.at_s < b.at_s; });
  if (made.requests.empty()) {
    refuse(fmt::format("'{}' brings no request in {:g} s", description, of.length_s));
  }
  return made;
}

std::optional<scheduler::switching_poisson> switching_of(std::string const& description) {
  auto const [name, rest] = name_and_rest(description);
  process_parameters const with{name, rest};
  if (name == "mmpp") {
    return switching(with);
  }
  if (name == "poisson") {
    double const rate = rate_of(with);
    return scheduler::switching_poisson{.rates_per_s = {rate, rate}, .switches_per_s = {1.0, 1.0}};
  }
  return std::nullopt;
}

}  // namespace sluice::simulator
