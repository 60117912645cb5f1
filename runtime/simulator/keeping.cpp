#include "runtime/simulator/keeping.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <string_view>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/policy/units.hpp"
#include "scheduler/admission.hpp"
#include "scheduler/agenda.hpp"
#include "scheduler/device_demands.hpp"
#include "scheduler/joint_keeping.hpp"
#include "scheduler/model_controller.hpp"
#include "scheduler/reserve.hpp"

namespace sluice::simulator {
namespace {

scheduler::instant at(double now_s) {
  return scheduler::instant{scheduler::seconds{now_s}};
}

// Finer parts than that would gain little: a cold start is in time or not by a part of a load at most.
constexpr unsigned most_parts = 16;

/// As the server's front has it: when a new request of a device would be answered, by those that it has.
class foresight {
 public:
  /// `is_warm`: of the device's models, by place.
  foresight(std::size_t models, unsigned parallel, std::function<bool(std::size_t)> is_warm)
      : line_(models, parallel == 1 ? scheduler::admission::lines::one_for_all
                                    : scheduler::admission::lines::one_for_each_model),
        seen_{.is_warm = std::move(is_warm), .computed_since = [](auto) { return std::nullopt; }},
        waiting_(models) {}

  [[nodiscard]] scheduler::seconds expected(std::size_t model, double now_s) {
    return line_.ask(model, at(now_s), at(never), seen_).predicted;
  }
  void add(std::size_t model, double now_s) {
    waiting_[model].push_back(++last_);
    line_.add(model, last_, at(now_s), at(never), seen_);
  }
  void on_answer(std::size_t model, double now_s) {
    line_.on_answer(model, waiting_[model].front(), at(now_s));
    waiting_[model].pop_front();
  }

 private:
  scheduler::admission line_;
  scheduler::admission::sight seen_;
  std::vector<std::deque<scheduler::admission::ticket>> waiting_;
  scheduler::admission::ticket last_ = 0;
};

class scheduled_keeping final : public keeping {
 public:
  scheduled_keeping(keeping_kind const& kind, keeping_inputs const& of)
      : models_(*of.models),
        reserve_bytes_(kind.reserve_bytes),
        resident_parts_(kind.resident_parts),
        memory_bytes_(of.memory_bytes),
        executors_{.at_once = of.parallel, .slowdown = of.slowdown},
        agenda_(models_.size()),
        predicted_(models_.size()),
        held_(models_.size()),
        together_(models_.size()),
        cold_(models_.size()) {
    for (unsigned i = 0; i < of.devices; ++i) {
      devices_.push_back({.keeper = scheduler::reserve{chunk_bytes}});
    }
    std::vector<std::uint64_t> bytes(of.devices);
    for (auto const& model : models_) {
      bytes[model.device] += model.bytes;
    }
    for (unsigned i = 0; i < of.devices; ++i) {
      devices_[i].is_crowded = !memory_bytes_.empty() && bytes[i] > memory_of(i);
    }
    for (auto const& model : models_) {
      // Told beforehand as little as the server is: what weights of that size take.
      controllers_.emplace_back(
          scheduler::model_settings{
              .goal = model.goal,
              .weight_bytes = model.bytes,
              .limits = model.limits,
              .load = {.mean = scheduler::seconds{of.costs.mean_s(model.bytes)}, .scv = 0.25},
              .reject_on_miss = of.refuse,
              .may_prewarm = true,
              .resident_parts = kind.resident_parts},
          at(0.0));
      auto const number = controllers_.size() - 1;
      places_.push_back(devices_[model.device].models.size());
      devices_[model.device].models.push_back(number);
      decide(number, at(0.0));
    }
    for (std::size_t d = 0; d < (of.refuse ? devices_.size() : 0); ++d) {
      foresights_.emplace_back(
          devices_[d].models.size(), of.parallel,
          [this, d](std::size_t place) { return !is_cold_[devices_[d].models[place]]; });
    }
  }

  admission on_arrival(model_number model, double now_s, std::uint64_t number) override {
    auto* const front = foresight_of(model);
    auto const made = controllers_[model].on_arrival(
        at(now_s), number + 1,
        front != nullptr ? std::optional{front->expected(places_[model], now_s)} : std::nullopt);
    if (front != nullptr && made.admitted) {
      front->add(places_[model], now_s);
    }
    note(model);
    return {made.admitted, made.is_retry, made.retry_after.count()};
  }
  void on_load(model_number model, double now_s, double load_s, double handover_s,
               double copied_share) override {
    controllers_[model].on_load(at(now_s), scheduler::seconds{load_s},
                                scheduler::seconds{handover_s}, copied_share);
    note(model);
    is_cold_[model] = false;
  }
  void on_answer(model_number model, double now_s, double service_s, double response_s,
                 bool is_retry) override {
    controllers_[model].on_service(at(now_s), scheduler::seconds{service_s},
                                   scheduler::seconds{response_s}, is_retry);
    devices_[models_[model].device].demands.add(at(now_s), scheduler::seconds{service_s});
    if (auto* const front = foresight_of(model)) {
      front->on_answer(places_[model], now_s);
    }
    note(model);
  }
  double tick_s() const override { return tick_length.count(); }
  void tick(double now_s) override {
    agenda_.take(at(now_s), [&](std::size_t model) { decide(model, at(now_s)); });
    for (auto& each : devices_) {
      if (each.demands.has_moved(at(now_s), each.models.size())) {
        decide_together(each, at(now_s));
      }
    }
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      share_memory(d);
    }
    keep_reserves();
  }
  double idle_timeout(model_number model, double idle_since_s, double now_s) override {
    return together_[model]
               ? together_[model]->idle_timeout.count()
               : controllers_[model].idle_timeout_since(at(idle_since_s), at(now_s)).count();
  }
  double resident_share(model_number model) const override {
    return together_[model] ? static_cast<double>(together_[model]->parts) / resident_parts_
                            : controllers_[model].resident_share();
  }
  double absence_loss(model_number model, double now_s) const override {
    return controllers_[model].absence_loss(at(now_s));
  }
  void on_evicted(model_number model) override { is_cold_[model] = true; }
  std::optional<double> load_at(model_number model, double now_s) override {
    auto const when = together_[model] ? std::nullopt : controllers_[model].prewarm_at(at(now_s));
    return when ? std::optional{when->time_since_epoch().count()} : std::nullopt;
  }
  void on_idle_end(model_number model, std::vector<model_number>& go) override {
    is_cold_[model] = true;
    go.push_back(model);
  }
  std::uint64_t kept_free(unsigned device) const override { return devices_[device].free_bytes; }
  std::uint64_t take_free(unsigned device, std::uint64_t bytes) override {
    auto const taken = std::min(bytes, devices_[device].free_bytes);
    devices_[device].free_bytes -= taken;
    return taken;
  }
  void give_free(unsigned device, std::uint64_t bytes) override {
    devices_[device].free_bytes += bytes;
    devices_[device].keep();  // training takes at once what is free beyond the reserve
  }
  std::optional<double> predicted(model_number model) const override {
    return predicted_[model].attainment;
  }

 private:
  [[nodiscard]] foresight* foresight_of(model_number model) {
    return foresights_.empty() ? nullptr : &foresights_[models_[model].device];
  }
  void note(model_number model) {
    if (controllers_[model].has_news()) {
      agenda_.want(model);
    }
  }
  struct device_state {
    scheduler::reserve keeper;
    std::vector<std::size_t> models{};
    bool is_crowded = false;   ///< not all of its models have room at once
    bool has_decided = false;  ///< since memory was shared out
    scheduler::joint_keeping shared{};
    scheduler::device_demands demands{at(0.0)};
    std::uint64_t free_bytes = 0;
    std::uint64_t size_bytes = 0;

    void keep() {
      free_bytes = keeper.update({.free_bytes = free_bytes, .size_bytes = size_bytes}).keep_bytes;
    }
  };
  void decide(std::size_t model, scheduler::instant now) {
    auto const& demands = devices_[models_[model].device].demands;
    auto const made = controllers_[model].tick(now, demands.beside(places_[model])).warm;
    predicted_[model] = made.chosen;
    if (auto& device = devices_[models_[model].device]; device.is_crowded) {
      held_[model] = made;
      device.has_decided = true;
    }
    auto const gone = (1.0 - controllers_[model].resident_share()) * bytes_of(model);
    cold_[model] = scheduler::cold_model_of(made, static_cast<std::uint64_t>(gone));
    agenda_.want_at(model, controllers_[model].due());
  }
  [[nodiscard]] double bytes_of(std::size_t model) const {
    return static_cast<double>(models_[model].bytes);
  }
  [[nodiscard]] std::uint64_t memory_of(std::size_t device) const {
    return memory_bytes_.empty() ? 0 : memory_bytes_[std::min(device, memory_bytes_.size() - 1)];
  }

  /// What they ask for has moved.
  void decide_together(device_state& device, scheduler::instant now) {
    std::vector<scheduler::shared_model> asked;
    asked.reserve(device.models.size());
    for (auto const model : device.models) {
      asked.push_back(controllers_[model].demand(now));
    }
    device.demands.predict(now, asked, executors_);
    for (auto const model : device.models) {
      decide(model, now);
    }
  }

  /// Where what each model wants is more than there is, timeouts and what stays are chosen for all together.
  void share_memory(std::size_t device) {
    auto& its = devices_[device];
    if (!std::exchange(its.has_decided, false)) {
      return;
    }
    std::vector<scheduler::joint_keeping::model> all;
    all.reserve(its.models.size());
    for (auto const model : its.models) {
      all.push_back({.decision = &held_[model],
                     .weight_bytes = bytes_of(model),
                     .max_idle = models_[model].limits.max_idle});
    }
    auto in_force = its.shared.share(all, static_cast<double>(memory_of(device)));
    for (std::size_t i = 0; i < its.models.size(); ++i) {
      auto const model = its.models[i];
      predicted_[model] = in_force[i].value_or(held_[model].chosen);
      together_[model] = in_force[i];
    }
  }

  // As the server has them.
  static constexpr std::uint64_t chunk_bytes = 2U << 20U;
  static constexpr std::uint64_t largest_reserve_divisor = 4;
  static constexpr scheduler::seconds tick_length{1.0};

  void keep_reserves() {
    std::vector<std::vector<scheduler::cold_model>> cold(devices_.size());
    for (std::size_t i = 0; i < models_.size(); ++i) {
      if (is_cold_[i]) {
        cold[models_[i].device].push_back(cold_[i]);
      }
    }
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      auto& its = devices_[d];
      auto const memory = memory_of(d);
      auto most = memory / largest_reserve_divisor;
      if (its.is_crowded) {  // of what models do not have
        double const rest = std::max(0.0, static_cast<double>(memory) - its.shared.wanted_bytes());
        most = std::min(most, static_cast<std::uint64_t>(rest));
      }
      its.size_bytes = reserve_bytes_.value_or(
          scheduler::reserve_size(cold[d], most, its.size_bytes > 0, tick_length));
      devices_[d].keep();
    }
  }

  std::vector<simulated_model> const& models_;
  std::optional<std::uint64_t> reserve_bytes_;
  unsigned resident_parts_;
  std::vector<std::uint64_t> memory_bytes_;
  scheduler::shared_executors executors_;
  std::vector<scheduler::model_controller> controllers_;
  std::vector<std::size_t> places_;  ///< among those of its device
  scheduler::agenda agenda_;
  std::vector<scheduler::prediction> predicted_;
  std::vector<scheduler::warm_decision> held_;                  ///< of each for itself
  std::vector<std::optional<scheduler::prediction>> together_;  ///< instead, where memory is short
  std::vector<scheduler::cold_model> cold_;                     ///< what each would be if it was
  std::vector<bool> is_cold_ = std::vector<bool>(models_.size(), true);
  std::vector<device_state> devices_;
  std::vector<foresight> foresights_;  ///< by device, where requests are refused
};

class fixed_keeping final : public keeping {
 public:
  explicit fixed_keeping(double timeout_s) : timeout_s_(timeout_s) {}
  bool begins_warm() const override { return timeout_s_ == never; }
  double idle_timeout(model_number /*model*/, double /*idle_since_s*/, double /*now_s*/) override {
    return timeout_s_;
  }

 private:
  double timeout_s_;
};

// Shi and others, Sirius, USENIX ATC 2025, algorithm 1. A model's rank is the number of requests it ever had, as in its program.
class sirius_keeping final : public keeping {
 public:
  sirius_keeping(keeping_kind const& kind, keeping_inputs const& of)
      : timeout_s_(kind.timeout_s),
        reserve_bytes_(kind.reserve_bytes.value_or(0)),
        models_(*of.models),
        asked_(models_.size()),
        kept_(of.devices) {}

  admission on_arrival(model_number model, double /*now_s*/, std::uint64_t /*number*/) override {
    ++asked_[model];
    std::erase(kept_[models_[model].device], model);
    return {};
  }
  double idle_timeout(model_number /*model*/, double /*idle_since_s*/, double /*now_s*/) override {
    return timeout_s_;
  }
  double absence_loss(model_number model, double /*now_s*/) const override {
    return static_cast<double>(asked_[model]);
  }
  void on_evicted(model_number model) override { std::erase(kept_[models_[model].device], model); }
  void on_idle_end(model_number model, std::vector<model_number>& go) override {
    auto& kept = kept_[models_[model].device];
    kept.push_back(model);
    std::uint64_t bytes = 0;
    for (auto const each : kept) {
      bytes += models_[each].bytes;
    }
    if (bytes <= 2 * reserve_bytes_) {
      return;
    }
    std::stable_sort(kept.begin(), kept.end(),
                     [this](auto a, auto b) { return asked_[a] > asked_[b]; });
    while (bytes > reserve_bytes_ && !kept.empty()) {
      bytes -= models_[kept.back()].bytes;
      go.push_back(kept.back());
      kept.pop_back();
    }
  }

 private:
  double timeout_s_;
  std::uint64_t reserve_bytes_;
  std::vector<simulated_model> const& models_;
  std::vector<std::uint64_t> asked_;
  std::vector<std::vector<model_number>> kept_;  ///< by device: idle for long, and still there
};

// Shahrad and others, Serverless in the Wild, USENIX ATC 2020: a histogram of idle times in minutes up to four hours; from its 5th to
// its 99th percentile, with a tenth of margin, a model is there. Where it says little (the counts of its bins vary too
// little, or most times lie beyond) a model is kept for the histogram's whole range.
class wild_keeping final : public keeping {
 public:
  explicit wild_keeping(keeping_inputs const& of) : models_(of.models->size()) {}

  admission on_arrival(model_number model, double now_s, std::uint64_t /*number*/) override {
    auto& its = models_[model];
    if (its.idle_since) {
      double const minutes = (now_s - *its.idle_since) / minute_s;
      if (minutes < bins) {
        ++its.counts[static_cast<std::size_t>(minutes)];
        ++its.inside;
      } else {
        ++its.beyond;
      }
      its.idle_since.reset();
    }
    return {};
  }
  void on_answer(model_number model, double now_s, double /*service_s*/, double /*response_s*/,
                 bool /*is_retry*/) override {
    models_[model].idle_since = now_s;
    models_[model].window = window_of(models_[model]);
    models_[model].is_unasked = false;
  }
  double idle_timeout(model_number model, double /*idle_since_s*/, double /*now_s*/) override {
    auto const& its = models_[model];
    if (its.is_unasked) {
      return its.window.keep_s;
    }
    return its.window.load_after_s > 0.0 ? 0.0 : its.window.keep_s;
  }
  std::optional<double> load_at(model_number model, double /*now_s*/) override {
    auto& its = models_[model];
    if (its.is_unasked || its.window.load_after_s <= 0.0 || !its.idle_since) {
      return std::nullopt;
    }
    its.is_unasked = true;
    return *its.idle_since + its.window.load_after_s;
  }

 private:
  static constexpr std::size_t bins = 240;
  static constexpr double minute_s = 60.0;
  static constexpr double least_cv = 2.0;
  static constexpr double margin = 0.1;
  struct keeping_window {
    double load_after_s = 0.0;
    double keep_s = bins * minute_s;
  };
  struct gaps {
    std::array<std::uint32_t, bins> counts{};
    std::uint64_t inside = 0, beyond = 0;
    std::optional<double> idle_since;
    keeping_window window{};
    bool is_unasked = false;  ///< loaded, or to be, before anybody asked
  };

  static keeping_window window_of(gaps const& its) {
    double const mean = static_cast<double>(its.inside) / bins;
    double square = 0.0;
    for (auto const each : its.counts) {
      square += (each - mean) * (each - mean);
    }
    bool const says_much =
        its.inside > 0 && its.inside > its.beyond && std::sqrt(square / bins) > least_cv * mean;
    if (!says_much) {
      return {};
    }
    double const first = percentile(its, 0.05, false), last = percentile(its, 0.99, true);
    double const load_after = first * minute_s * (1.0 - margin);
    return {load_after, std::max(0.0, last * minute_s * (1.0 + margin) - load_after)};
  }
  /// The bin's lower or upper end, in minutes.
  static double percentile(gaps const& its, double share, bool upper) {
    double const wanted = share * static_cast<double>(its.inside);
    double sum = 0.0;
    for (std::size_t i = 0; i < bins; ++i) {
      sum += its.counts[i];
      if (sum >= wanted) {
        return static_cast<double>(upper ? i + 1 : i);
      }
    }
    return bins;
  }

  std::vector<gaps> models_;
};

class clairvoyant_keeping final : public keeping {
 public:
  explicit clairvoyant_keeping(keeping_inputs const& of)
      : models_(*of.models), costs_(of.costs), times_(models_.size()), next_(models_.size()) {
    for (auto const& each : of.requests->requests) {
      times_[each.model].push_back(each.at_s);
    }
  }

  admission on_arrival(model_number model, double /*now_s*/, std::uint64_t /*number*/) override {
    ++next_[model];
    return {};
  }

  /// The one that is wanted last goes first.
  double absence_loss(model_number model, double now_s) const override {
    return 1.0 / std::max(1e-9, next_of(model) - now_s);
  }
  double idle_timeout(model_number model, double /*idle_since_s*/, double now_s) override {
    return next_of(model) - now_s > load_s(model) ? 0.0 : never;
  }
  std::optional<double> load_at(model_number model, double now_s) override {
    double const next = next_of(model);
    return next == never ? std::nullopt : std::optional{std::max(now_s, next - load_s(model))};
  }

 private:
  [[nodiscard]] double load_s(model_number model) const {
    return costs_.mean_s(models_[model].bytes);
  }
  [[nodiscard]] double next_of(model_number model) const {
    auto const& times = times_[model];
    return next_[model] < times.size() ? times[next_[model]] : never;
  }

  std::vector<simulated_model> const& models_;
  load_costs costs_;
  std::vector<std::vector<double>> times_;
  std::vector<std::size_t> next_;
};

double seconds_of(std::string const& text, std::string const& description) {
  if (text == "forever" || text == "inf") {
    return never;
  }
  try {
    return std::chrono::duration<double>{policy::parse_duration(text)}.count();
  } catch (error const& wrong) {
    throw error{
        error_kind::invalid_argument,
        fmt::format("policy '{}': {}; `forever` is allowed too", description, wrong.what())};
  }
}

std::uint64_t bytes_of(std::string const& text, std::string const& description) {
  try {
    return policy::parse_bytes(text);
  } catch (error const& wrong) {
    throw error{error_kind::invalid_argument,
                fmt::format("policy '{}': {}", description, wrong.what())};
  }
}

}  // namespace

keeping_kind parse_keeping(std::string const& description) {
  using what = keeping_kind::what;
  auto const colon = description.find(':');
  auto const name = description.substr(0, colon);
  auto const rest = colon == std::string::npos ? std::string{} : description.substr(colon + 1);
  if (name == "fixed" && !rest.empty()) {
    return {what::fixed, seconds_of(rest, description)};
  }
  if (name == "sirius" && !rest.empty()) {
    auto const slash = rest.find('/');
    if (slash == std::string::npos) {
      throw error{error_kind::invalid_argument,
                  fmt::format("policy '{}' must be a time and a size, such as sirius:5s/1GiB",
                              description)};
    }
    return {what::sirius, seconds_of(rest.substr(0, slash), description),
            bytes_of(rest.substr(slash + 1), description)};
  }
  if ((name == "ours" || name == "partial") && (colon == std::string::npos || !rest.empty())) {
    keeping_kind made{what::ours};
    made.resident_parts = name == "partial" ? most_parts : 1;
    if (!rest.empty()) {
      made.reserve_bytes = bytes_of(rest, description);
    }
    return made;
  }
  if (colon == std::string::npos) {
    if (name == "always") {
      return {what::fixed, never};
    }
    if (name == "cold") {
      return {what::fixed, 0.0};
    }
    if (name == "sirius") {
      return {what::sirius, 5.0, 1'000'000'000};
    }
    if (name == "wild") {
      return {what::wild};
    }
    if (name == "clairvoyant") {
      return {what::clairvoyant};
    }
  }
  throw error{error_kind::invalid_argument,
              fmt::format("there is no policy '{}'; there are ours, ours:1GiB, partial, "
                          "partial:1GiB, always, cold, fixed:60s, sirius, "
                          "sirius:5s/1GiB, wild and clairvoyant",
                          description)};
}

std::unique_ptr<keeping> make_keeping(std::string const& description, keeping_inputs const& of) {
  auto const kind = parse_keeping(description);
  switch (kind.is) {
    case keeping_kind::what::ours:
      return std::make_unique<scheduled_keeping>(kind, of);
    case keeping_kind::what::fixed:
      return std::make_unique<fixed_keeping>(kind.timeout_s);
    case keeping_kind::what::sirius:
      return std::make_unique<sirius_keeping>(kind, of);
    case keeping_kind::what::wild:
      return std::make_unique<wild_keeping>(of);
    case keeping_kind::what::clairvoyant:
      break;
  }
  return std::make_unique<clairvoyant_keeping>(of);
}

}  // namespace sluice::simulator
