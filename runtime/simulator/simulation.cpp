#include "runtime/simulator/simulation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <queue>

#include "memhandover/base/error.hpp"
#include "runtime/simulator/draws.hpp"
#include "scheduler/eviction.hpp"

namespace sluice::simulator {
namespace {

constexpr std::uint32_t nobody = std::numeric_limits<std::uint32_t>::max();

enum class timed_event_kind : std::uint8_t {
  answer,
  loaded,
  released,
  idle_end,
  load,
  tick,
  retry
};

struct timed_event {
  double at_s;
  std::uint64_t order;  ///< of those at the same time the first made comes first
  std::uint32_t of;     ///< a device, a model or a request
  std::uint32_t version;
  timed_event_kind kind;

  bool operator>(timed_event const& other) const {
    return at_s != other.at_s ? at_s > other.at_s : order > other.order;
  }
};

/// A request on its way.
struct request_on_way {
  double at_s;
  double service_s;
  std::uint64_t number;
  std::uint32_t model;
  std::uint32_t next;  ///< in its model's queue, or among free places
  double sent_s;       ///< the last time
  unsigned refusals = 0;
  bool is_retry = false;  ///< as its policy sees it
};

enum class model_place : std::uint8_t { cold, loading, warm, releasing };

/// There is one for every model of a fleet: as few bytes as will do.
struct kept_state {
  double since = 0.0;  ///< idle, cold, or being loaded
  double handover_s = 0.0;
  double timer_end = never;  ///< when the idle timer ends
  double load_at = never;    ///< when it is to be loaded unasked
  float resident = 0.0F;     ///< what is there of its weights while it is cold or being loaded
  std::uint32_t first = nobody, last = nobody;
  std::uint32_t running : 29 = 0;
  model_place is : 2 = model_place::cold;
  bool waits_for_memory : 1 = false;  ///< cold, and its load has been asked for

  [[nodiscard]] bool is_idle() const {
    return is == model_place::warm && running == 0 && first == nobody;
  }
};

struct running_request {
  std::uint32_t request;
  double left_s;  ///< of its service alone
};

using numbered_model = std::pair<std::uint64_t, model_number>;

struct computing_device {
  std::vector<running_request> running;
  std::priority_queue<numbered_model, std::vector<numbered_model>, std::greater<>>
      ready;  ///< models with a request that may begin, by its number; each once
  double updated_s = 0.0;
  double free_since = 0.0;
  std::uint32_t version = 0;
  std::vector<model_number> models{};  ///< where its memory is limited
  std::uint64_t memory_bytes = 0;
  std::uint64_t used_bytes = 0;        ///< by models, and what of them stays
  std::deque<model_number> waiting{};  ///< for memory, to be loaded
};

class event_loop {
 public:
  event_loop(trace const& requests, std::vector<simulated_model> const& models, keeping& policy,
             simulation_settings const& settings)
      : requests_(requests),
        models_(models),
        policy_(policy),
        settings_(settings),
        random_(settings.seed),
        states_(models.size()),
        devices_(settings.devices) {
    check();
    outcome_.models.resize(models.size());
    for (model_number m = 0; m < models.size(); ++m) {
      if (!settings_.memory_bytes.empty()) {
        devices_[models[m].device].models.push_back(m);
      }
    }
    for (unsigned d = 0; d < devices_.size(); ++d) {
      devices_[d].memory_bytes = memory_of(d);
    }
  }

  simulation_outcome all() {
    begin();
    if (policy_.tick_s() > 0.0) {
      push(policy_.tick_s(), timed_event_kind::tick, 0, 0);
    }
    constexpr std::size_t between_reports = 1U << 14U;
    auto const& arrivals = requests_.requests;
    for (std::size_t i = 0; i < arrivals.size(); ++i) {
      until(arrivals[i].at_s);
      arrive(arrivals[i], i);
      if (settings_.progress && i % between_reports == 0) {
        settings_.progress(static_cast<double>(i) / static_cast<double>(arrivals.size()));
      }
    }
    until(requests_.length_s);
    arrivals_left_ = false;
    finish_accounts(std::max(requests_.length_s, settings_.count_from_s));
    until(never);  // those who wait are answered
    return std::move(outcome_);
  }

 private:
  void check() const {
    auto const refuse = [](std::string const& why) {
      throw error{error_kind::invalid_argument, why};
    };
    if (settings_.devices == 0 || settings_.parallel == 0) {
      refuse("there must be at least one device, which computes at least one request at once");
    }
    for (double const each : settings_.slowdown) {
      if (!(each > 0.0) || !std::isfinite(each)) {
        refuse(fmt::format("a slow-down is {}, must be more than 0, and 1 for none", each));
      }
    }
    for (auto const& each : models_) {
      if (each.device >= settings_.devices || each.instances == 0) {
        refuse("a model has no device, or no instance");
      }
      if (each.bytes > memory_of(each.device)) {
        refuse(
            fmt::format("a model of {} bytes is on a device of {} bytes; it must have room there",
                        each.bytes, memory_of(each.device)));
      }
    }
    if (!(settings_.release_s >= 0.0) || !(settings_.costs.bytes_per_s > 0.0)) {
      refuse("releases must take 0 s or more, and copies have a rate of more than 0");
    }
  }

  [[nodiscard]] std::uint64_t memory_of(std::size_t device) const {
    auto const& all = settings_.memory_bytes;
    return all.empty() ? std::numeric_limits<std::uint64_t>::max()
                       : all[std::min(device, all.size() - 1)];
  }

  void begin() {
    for (model_number m = 0; m < states_.size(); ++m) {
      auto& device = devices_[models_[m].device];
      if (policy_.begins_warm() && models_[m].bytes <= free_bytes(device)) {
        device.used_bytes += models_[m].bytes;
        states_[m].is = model_place::warm;
        wait_for_idle_end(m);
      } else {
        plan_load(m);
      }
    }
  }

  void push(double at_s, timed_event_kind kind, std::uint32_t of, std::uint32_t version) {
    events_.push({at_s, ++order_, of, version, kind});
  }

  void until(double end_s) {
    while (!events_.empty() && events_.top().at_s <= end_s) {
      auto const next = events_.top();
      events_.pop();
      now_ = next.at_s;
      handle(next);
    }
    if (end_s < never) {
      now_ = end_s;
    }
  }

  void handle(timed_event const& it) {
    switch (it.kind) {
      case timed_event_kind::answer:
        if (devices_[it.of].version == it.version) {
          answer(it.of);
        }
        return;
      case timed_event_kind::loaded:
        become_warm(it.of);
        return;
      case timed_event_kind::released:
        become_cold(it.of);
        return;
      case timed_event_kind::idle_end:
        if (states_[it.of].timer_end == it.at_s) {
          states_[it.of].timer_end = never;
          end_idle(it.of);
        }
        return;
      case timed_event_kind::load:
        if (states_[it.of].is == model_place::cold && states_[it.of].load_at == it.at_s &&
            !states_[it.of].waits_for_memory &&
            missing_bytes(it.of) <= free_bytes(devices_[models_[it.of].device])) {
          begin_load(it.of);  // nobody leaves for one that nobody has asked for
        }
        return;
      case timed_event_kind::tick:
        tick();
        return;
      case timed_event_kind::retry:
        send(it.of);
    }
  }

  void tick() {
    if (!arrivals_left_) {
      return;
    }
    account_free();
    policy_.tick(now_);
    for (model_number m = 0; m < states_.size(); ++m) {  // timeouts may be others
      if (states_[m].is_idle()) {
        wait_for_idle_end(m);
      } else if (states_[m].is == model_place::cold) {
        leave_resident(m, policy_.resident_share(m));
        plan_load(m);
      }
    }
    push(now_ + policy_.tick_s(), timed_event_kind::tick, 0, 0);
  }

  void arrive(arriving const& what, std::uint64_t number) {
    auto& counts = outcome_.models[what.model];
    bool const counted = what.at_s >= settings_.count_from_s;
    counts.requests += counted ? 1 : 0;
    if (auto const share = policy_.predicted(what.model); share && counted) {
      counts.predicted += *share;
      ++counts.predictions;
    }
    send(take_place({what.at_s, what.service_s, number, what.model, nobody, now_}));
  }

  /// For the first time, or again. Clients wait as long as they are told to, and up to a quarter more.
  void send(std::uint32_t request) {
    auto& it = flights_[request];
    auto& state = states_[it.model];
    auto& counts = outcome_.models[it.model];
    bool const counted = it.at_s >= settings_.count_from_s;
    it.sent_s = now_;
    auto const answer = policy_.on_arrival(it.model, now_, it.number);
    it.is_retry = answer.is_retry;
    if (!answer.admitted && it.refusals < settings_.retries) {
      ++it.refusals;
      constexpr double longest_more = 0.25;
      push(now_ + answer.retry_after_s * (1.0 + longest_more * random_.uniform()),
           timed_event_kind::retry, request, 0);
      return;
    }
    if (!answer.admitted) {
      counts.refused += counted ? 1 : 0;
      leave_place(request);
      return;
    }
    counts.cold += counted && state.is != model_place::warm ? 1 : 0;
    bool const was_waiting = state.first != nobody;
    (was_waiting ? flights_[state.last].next : state.first) = request;
    state.last = request;
    auto const model = it.model;
    if (state.is == model_place::cold) {
      want_load(model);
    } else if (state.is == model_place::warm && !was_waiting) {
      make_ready(model);
      start(models_[model].device);
    }
  }

  void leave_place(std::uint32_t request) {
    flights_[request].next = free_place_;
    free_place_ = request;
  }

  std::uint32_t take_place(request_on_way const& what) {
    if (free_place_ == nobody) {
      flights_.push_back(what);
      return static_cast<std::uint32_t>(flights_.size() - 1);
    }
    auto const place = free_place_;
    free_place_ = flights_[place].next;
    flights_[place] = what;
    return place;
  }

  /// Its next request may begin as soon as there is room.
  void make_ready(model_number model) {
    auto const& state = states_[model];
    if (state.is == model_place::warm && state.first != nobody &&
        state.running < models_[model].instances) {
      devices_[models_[model].device].ready.emplace(flights_[state.first].number, model);
    }
  }

  [[nodiscard]] double slowdown(std::size_t at_once) const {
    return settings_.slowdown.empty()
               ? 1.0
               : settings_.slowdown[std::min(at_once, settings_.slowdown.size()) - 1];
  }

  /// What has been done of those that compute.
  void advance(computing_device& device) const {
    if (!device.running.empty()) {
      double const done = (now_ - device.updated_s) / slowdown(device.running.size());
      for (auto& each : device.running) {
        each.left_s = std::max(0.0, each.left_s - done);
      }
    }
    device.updated_s = now_;
  }

  void start(unsigned which) {
    auto& device = devices_[which];
    if (device.ready.empty() || device.running.size() >= settings_.parallel) {
      return;
    }
    advance(device);
    while (!device.ready.empty() && device.running.size() < settings_.parallel) {
      auto const model = device.ready.top().second;
      device.ready.pop();
      auto& state = states_[model];
      auto const request = state.first;
      state.first = flights_[request].next;
      ++state.running;
      device.running.push_back({request, flights_[request].service_s});
      make_ready(model);
    }
    plan_answer(which);
  }

  void plan_answer(unsigned which) {
    auto& device = devices_[which];
    ++device.version;
    if (device.running.empty()) {
      return;
    }
    auto const next =
        std::min_element(device.running.begin(), device.running.end(),
                         [](auto const& a, auto const& b) { return a.left_s < b.left_s; });
    push(now_ + next->left_s * slowdown(device.running.size()), timed_event_kind::answer, which,
         device.version);
  }

  void answer(unsigned which) {
    auto& device = devices_[which];
    advance(device);
    auto const done =
        std::min_element(device.running.begin(), device.running.end(),
                         [](auto const& a, auto const& b) { return a.left_s < b.left_s; });
    auto const request = done->request;
    device.running.erase(done);
    auto const it = flights_[request];
    leave_place(request);
    count_answer(it);
    auto& state = states_[it.model];
    bool const was_full = state.running-- == models_[it.model].instances;
    policy_.on_answer(it.model, now_, it.service_s, now_ - it.sent_s, it.is_retry);
    if (state.is_idle()) {
      state.since = now_;
      load_those_that_wait(which);
      if (state.is_idle()) {
        wait_for_idle_end(it.model);
      }
    } else if (was_full) {
      make_ready(it.model);
    }
    if (device.ready.empty()) {
      plan_answer(which);
    } else {
      start(which);
    }
  }

  void count_answer(request_on_way const& it) {
    if (it.at_s < settings_.count_from_s) {
      return;
    }
    auto& counts = outcome_.models[it.model];
    double const response = now_ - it.at_s;
    ++counts.answered;
    counts.responses_s += response;
    counts.waits_s += response - it.service_s;
    counts.within += response <= models_[it.model].goal.latency.count() ? 1 : 0;
    outcome_.responses.add(response);
  }

  /// Sets its timer to when its policy wants it to go by what it says now.
  void wait_for_idle_end(model_number model) {
    auto& state = states_[model];
    double const end = state.since + policy_.idle_timeout(model, state.since, now_);
    if (end == state.timer_end) {
      return;
    }
    state.timer_end = end;
    if (end <= now_) {
      state.timer_end = never;
      end_idle(model);
    } else if (end < never) {
      push(end, timed_event_kind::idle_end, model, 0);
    }
  }

  void end_idle(model_number model) {
    if (!states_[model].is_idle()) {
      return;
    }
    going_.clear();
    policy_.on_idle_end(model, going_);
    for (auto const each : going_) {
      if (states_[each].is_idle()) {
        release(each);
      }
    }
  }

  void release(model_number model) {
    auto& state = states_[model];
    state.timer_end = never;
    if (settings_.release_s > 0.0) {
      state.is = model_place::releasing;
      push(now_ + settings_.release_s, timed_event_kind::released, model, 0);
    } else {
      become_cold(model);
    }
  }

  void become_cold(model_number model) {
    auto& state = states_[model];
    state.is = model_place::cold;
    state.since = now_;
    state.resident = 1.0F;
    leave_resident(model, policy_.resident_share(model));
    state.load_at = never;
    if (state.first != nobody) {
      want_load(model);  // somebody came during the release
    } else {
      plan_load(model);
    }
    load_those_that_wait(models_[model].device);
  }

  /// Of a cold model, the rest goes.
  void leave_resident(model_number model, double of_weights) {
    auto& state = states_[model];
    auto const share = static_cast<float>(of_weights);
    if (share >= state.resident) {
      return;
    }
    count_released(model, now_);
    state.since = std::max(state.since, now_);
    auto const before = bytes_of(model, state.resident);
    state.resident = share;
    account_free();
    auto const left = before - bytes_of(model, share);
    devices_[models_[model].device].used_bytes -= left;
    policy_.give_free(models_[model].device, left);
  }

  [[nodiscard]] static std::uint64_t free_bytes(computing_device const& device) {
    return device.memory_bytes - device.used_bytes;
  }
  [[nodiscard]] std::uint64_t missing_bytes(model_number model) const {
    return models_[model].bytes - bytes_of(model, states_[model].resident);
  }

  /// Somebody waits for it.
  void want_load(model_number model) {
    if (!states_[model].waits_for_memory) {
      states_[model].waits_for_memory = true;
      devices_[models_[model].device].waiting.push_back(model);
      load_those_that_wait(models_[model].device);
    }
  }

  /// In turn, as far as there is memory, or others may leave.
  void load_those_that_wait(unsigned which) {
    auto& device = devices_[which];
    if (is_making_room_) {
      return;
    }
    is_making_room_ = true;
    while (!device.waiting.empty()) {
      auto const model = device.waiting.front();
      auto const missing = missing_bytes(model);
      if (missing > free_bytes(device)) {
        make_room(device, model, missing - free_bytes(device));
      }
      if (missing > free_bytes(device)) {
        break;  // until somebody has become idle, or has gone
      }
      device.waiting.pop_front();
      states_[model].waits_for_memory = false;
      begin_load(model);
    }
    is_making_room_ = false;
  }

  /// Idle models leave, and if they are not enough what stays of those that have gone as well; none if all are not enough.
  void make_room(computing_device const& device, model_number for_model, std::uint64_t bytes) {
    if (!evict_some(device, for_model, bytes, true)) {
      evict_some(device, for_model, bytes, false);
    }
  }

  bool evict_some(computing_device const& device, model_number for_model, std::uint64_t bytes,
                  bool parts_stay) {
    std::vector<scheduler::resident_model> there;
    std::vector<model_number> which;
    for (auto const m : device.models) {
      auto const& state = states_[m];
      bool const is_part = state.is == model_place::cold && state.resident > 0.0F;
      if (m == for_model || !(state.is_idle() || (is_part && !parts_stay))) {
        continue;
      }
      double const share = is_part      ? state.resident
                           : parts_stay ? 1.0 - policy_.resident_share(m)
                                        : 1.0;
      there.push_back({.bytes = bytes_of(m, share),
                       .loss_per_s = share * policy_.absence_loss(m, now_),
                       .idle = scheduler::seconds{now_ - state.since}});
      which.push_back(m);
    }
    auto const chosen = scheduler::models_to_release(there, bytes);
    for (auto const place : chosen) {
      evict(which[place], parts_stay);
    }
    return !chosen.empty();
  }

  void evict(model_number model, bool parts_stay) {
    if (states_[model].is_idle()) {
      release(model);
    }
    if (!parts_stay && states_[model].is == model_place::cold) {
      leave_resident(model, 0.0);
    }
    policy_.on_evicted(model);
  }

  [[nodiscard]] std::uint64_t bytes_of(model_number model, double share) const {
    return static_cast<std::uint64_t>(share * static_cast<double>(models_[model].bytes));
  }

  /// By what its policy says now.
  void plan_load(model_number model) {
    auto& state = states_[model];
    auto const at = policy_.load_at(model, now_);
    double const when = at ? std::max(*at, now_) : never;
    if (when == state.load_at) {
      return;
    }
    state.load_at = when;
    if (when < never) {
      push(when, timed_event_kind::load, model, 0);
    }
  }

  void begin_load(model_number model) {
    auto& state = states_[model];
    auto const bytes = missing_bytes(model);
    devices_[models_[model].device].used_bytes += bytes;
    state.is = model_place::loading;
    count_released(model, now_);
    state.since = now_;
    account_free();
    bool const is_free = bytes > 0 && policy_.take_free(models_[model].device, bytes) >= bytes;
    auto const& costs = settings_.costs;
    state.handover_s = is_free ? 0.0 : costs.handover.draw(random_);
    double const takes = state.handover_s + random_.gamma(costs.fixed_s, costs.fixed_scv) +
                         static_cast<double>(bytes) / costs.bytes_per_s;
    outcome_.models[model].loads += now_ >= settings_.count_from_s ? 1 : 0;
    push(now_ + takes, timed_event_kind::loaded, model, 0);
  }

  void become_warm(model_number model) {
    auto& state = states_[model];
    state.is = model_place::warm;
    policy_.on_load(model, now_, now_ - state.since, state.handover_s, 1.0 - state.resident);
    if (state.first != nobody) {
      make_ready(model);
      start(models_[model].device);
    } else {  // nobody has come yet
      state.since = now_;
      load_those_that_wait(models_[model].device);
      if (state.is_idle()) {
        wait_for_idle_end(model);
      }
    }
  }

  void count_released(model_number model, double end_s) {
    double const since = std::max(states_[model].since, settings_.count_from_s);
    double const length = std::max(0.0, std::min(end_s, account_end_) - since);
    double const gone = 1.0 - states_[model].resident;
    outcome_.models[model].released_s += length * gone;
    outcome_.released_byte_s += length * gone * static_cast<double>(models_[model].bytes);
  }

  /// What was kept free since the last time was not training's.
  void account_free() {
    for (unsigned d = 0; d < devices_.size(); ++d) {
      double const since = std::max(devices_[d].free_since, settings_.count_from_s);
      double const length = std::max(0.0, std::min(now_, account_end_) - since);
      outcome_.released_byte_s -= length * static_cast<double>(policy_.kept_free(d));
      devices_[d].free_since = now_;
    }
  }

  void finish_accounts(double end_s) {
    now_ = std::max(now_, end_s);
    account_free();
    double bytes = 0.0;
    for (model_number m = 0; m < states_.size(); ++m) {
      if (states_[m].is == model_place::cold) {
        count_released(m, end_s);
        states_[m].since = end_s;  // what comes after does not count
      }
      bytes += static_cast<double>(models_[m].bytes);
    }
    account_end_ = end_s;
    outcome_.length_s = end_s - settings_.count_from_s;
    outcome_.deployed_byte_s = bytes * outcome_.length_s;
  }

  trace const& requests_;
  std::vector<simulated_model> const& models_;
  keeping& policy_;
  simulation_settings const& settings_;
  draws random_;
  std::vector<kept_state> states_;
  std::vector<computing_device> devices_;
  std::vector<request_on_way> flights_;
  std::uint32_t free_place_ = nobody;
  std::priority_queue<timed_event, std::vector<timed_event>, std::greater<>> events_;
  std::vector<model_number> going_;
  std::uint64_t order_ = 0;
  double now_ = 0.0;
  double account_end_ = never;
  bool arrivals_left_ = true;
  bool is_making_room_ = false;
  simulation_outcome outcome_;
};

constexpr double shortest_bin_s = 1e-6;
constexpr double bins_per_octave = 36.0;

}  // namespace

void time_histogram::add(double seconds) {
  double const octaves = std::log2(std::max(seconds, shortest_bin_s) / shortest_bin_s);
  auto const bin = static_cast<std::size_t>(octaves * bins_per_octave);
  ++counts_[std::min(bin, bins - 1)];
  ++all_;
}

double time_histogram::quantile(double share) const {
  auto const wanted = std::max(1.0, std::ceil(share * static_cast<double>(all_)));
  double sum = 0.0;
  for (std::size_t i = 0; i < bins && all_ > 0; ++i) {
    sum += static_cast<double>(counts_[i]);
    if (sum >= wanted) {
      return shortest_bin_s * std::exp2((static_cast<double>(i) + 0.5) / bins_per_octave);
    }
  }
  return 0.0;
}

model_outcome& model_outcome::operator+=(model_outcome const& more) {
  requests += more.requests;
  refused += more.refused;
  answered += more.answered;
  within += more.within;
  cold += more.cold;
  loads += more.loads;
  waits_s += more.waits_s;
  responses_s += more.responses_s;
  released_s += more.released_s;
  predicted += more.predicted;
  predictions += more.predictions;
  return *this;
}

model_outcome simulation_outcome::all() const {
  model_outcome sum;
  for (auto const& each : models) {
    sum += each;
  }
  return sum;
}

double simulation_outcome::in_time() const {
  auto const sum = all();
  return sum.requests > 0 ? static_cast<double>(sum.within) / static_cast<double>(sum.requests)
                          : 1.0;
}

double simulation_outcome::released_share() const {
  return deployed_byte_s > 0.0 ? released_byte_s / deployed_byte_s : 0.0;
}

simulation_outcome simulate(trace const& requests, std::vector<simulated_model> const& models,
                            keeping& policy, simulation_settings const& settings) {
  return event_loop{requests, models, policy, settings}.all();
}

}  // namespace sluice::simulator
