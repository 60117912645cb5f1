#include "runtime/server/repository_control.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;
using std::chrono::ceil;
using std::chrono::milliseconds;

/// What changes when a model's file, or its configuration, does.
std::string stamp_of(model_entry const& of) {
  struct stat about {};
  (void)::stat(of.file.c_str(), &about);
  return fmt::format("{}-{}-{}.{:09}-{:x}", about.st_ino, about.st_size, about.st_mtim.tv_sec,
                     about.st_mtim.tv_nsec, std::hash<std::string>{}(of.config.dump()));
}

bool is_same(chosen_model const& one, chosen_model const& other) {
  return one.entry.metadata.name == other.entry.metadata.name &&
         one.entry.version == other.entry.version;
}

template <typename Each>
bool names(Each const& what, std::string const& model) {
  return std::any_of(what.begin(), what.end(),
                     [&](auto const& each) { return each.name == model; });
}

std::vector<std::string> without(std::set<std::string> const& these,
                                 std::set<std::string> const& those) {
  std::vector<std::string> rest;
  std::set_difference(these.begin(), these.end(), those.begin(), those.end(),
                      std::back_inserter(rest));
  return rest;
}

}  // namespace

repository_control::repository_control(start how, std::string text, policy::policy wanted,
                                       model_choice choice)
    : how_(std::move(how)) {
  state first{.text = std::move(text), .wanted = std::move(wanted)};
  first.unservable = std::move(choice.unservable);
  for (auto const& each : choice.served) {
    put(first, each);
  }
  now_ = std::move(first);
}

void repository_control::attach(remote_executor& executor, model_service& service) {
  std::lock_guard const lock{mutex_};
  executor_ = &executor;
  service_ = &service;
}

remote_executor::orders repository_control::orders() const {
  std::lock_guard const lock{mutex_};
  return orders_of(now_);
}

/// Whether that place has the same already, and has it in order.
bool repository_control::stands(std::size_t at, chosen_model const& version,
                                std::string const& stamp) const {
  auto const& there = now_.places[at];
  return !there.is_retired && is_same(there.is, version) && there.stamp == stamp &&
         !executor_->unservable(at);
}

/// In its own place if it has one, else in a free one, or behind the others.
void repository_control::put(state& next, chosen_model const& version) const {
  auto stamp = stamp_of(version.entry);
  for (std::size_t at = 0; at < now_.places.size(); ++at) {
    if (stands(at, version, stamp)) {
      next.places[at] = {version, std::move(stamp)};
      next.order.push_back(at);
      return;
    }
  }
  auto at = next.places.size();
  for (std::size_t i = 0; i < now_.places.size() && at == next.places.size(); ++i) {
    // Nobody has been put there, and nobody is there.
    if (next.places[i].is_retired && now_.places[i].is_retired && executor_->is_free(i)) {
      at = i;
    }
  }
  next.places.resize(std::max(next.places.size(), at + 1));
  next.places[at] = {version, std::move(stamp)};
  next.order.push_back(at);
}

/// All versions of it, with the promise that it has now. Whether there are any.
bool repository_control::keep(state& next, policy::model_policy const& model) const {
  bool has_any = false;
  for (auto const at : now_.order) {
    if (now_.places[at].is.entry.metadata.name == model.name) {
      next.places[at].is_retired = false;
      next.places[at].is.wanted = model;
      next.order.push_back(at);
      has_any = true;
    }
  }
  return has_any;
}

/// As things are, but for that model, which is retired.
repository_control::state repository_control::now_without(std::string const& model) const {
  auto next = now_;
  next.order.clear();
  for (auto& each : next.places) {
    each.is_retired = each.is_retired || each.is.entry.metadata.name == model;
  }
  for (auto const& each : now_.wanted.models) {
    if (each.name != model) {
      (void)keep(next, each);
    }
  }
  return next;
}

/// Of an engine that runs only `warm` can be another, and not whether it may be parked at all: it is started so.
void repository_control::refuse_other_engines(policy::policy const& wanted) const {
  auto before = engines_of(now_.wanted), after = engines_of(wanted);
  for (auto* const each : {&before, &after}) {
    for (auto& engine : *each) {
      auto const mode = engine.warm.mode;
      engine.warm = {};
      engine.warm.mode = mode == policy::warm_mode::always ? mode : policy::warm_mode::automatic;
    }
  }
  if (before == after) return;
  throw error{error_kind::unsupported,
              fmt::format("{}: engines cannot come, go or change while the server runs, but for "
                          "`warm`, and not that to or from `mode: always`; restart it, or put the "
                          "old ones back",
                          how_.policy_file.string())};
}

json repository_control::reload() {
  std::lock_guard const lock{mutex_};
  auto text = policy::read_text(how_.policy_file);
  auto wanted = how_.parse(text);
  if (auto const keys = policy::differing_keys(now_.wanted, wanted); !keys.empty()) {
    throw error{error_kind::unsupported,
                fmt::format("{}: {} cannot be changed while the server runs, only `models` can; "
                            "restart it, or put the old {} back",
                            how_.policy_file.string(), fmt::join(keys, ", "),
                            keys.size() == 1 ? "value" : "values")};
  }
  refuse_other_engines(wanted);
  auto const choice = choose_models(wanted, contents_of(wanted));
  state next{.text = std::move(text), .wanted = wanted, .places = now_.places};
  for (auto& each : next.places) {
    each.is_retired = true;
  }
  auto unservable = json::array();
  for (auto const& each : choice.unservable) {
    auto const its = std::find_if(wanted.models.begin(), wanted.models.end(),
                                  [&](auto const& one) { return one.name == each.name; });
    if (its != wanted.models.end()) {
      unservable.push_back({{"name", each.name}, {"reason", each.reason.what()}});
    }
    // What it was before is better than nothing.
    if (its == wanted.models.end() || !keep(next, *its)) {
      next.unservable.push_back(each);
    }
  }
  for (auto const& each : choice.served) {
    put(next, each);
  }
  std::set<std::string> before, after, changed;
  for (auto const at : now_.order) {
    before.insert(now_.places[at].is.entry.metadata.name);
  }
  for (auto const at : next.order) {
    auto const& name = next.places[at].is.entry.metadata.name;
    after.insert(name);
    bool const is_new = at >= now_.places.size() || now_.places[at].is_retired;
    if (before.contains(name) && is_new) {
      changed.insert(name);
    }
  }
  go_over_to(std::move(next));
  log_what_is_left(choice);
  for (auto const& each : faults({after.begin(), after.end()})) {
    unservable.push_back({{"name", each.name}, {"reason", each.reason.what()}});
  }
  return {{"added", without(after, before)},
          {"removed", without(before, after)},
          {"changed", changed},
          {"unservable", std::move(unservable)}};
}

void repository_control::load(std::string const& model) {
  std::lock_guard const lock{mutex_};
  auto const& wanted = now_.wanted;
  auto const its = std::find_if(wanted.models.begin(), wanted.models.end(),
                                [&](auto const& each) { return each.name == model; });
  if (its == wanted.models.end()) {
    throw error{error_kind::not_found,
                fmt::format("the policy does not name model '{}'; add it to {}, and have that "
                            "read again (sluice policy reload)",
                            model, how_.policy_file.string())};
  }
  auto const versions = read_model(wanted.server.model_repository, model);
  auto next = now_without(model);
  next.unloaded.erase(model);
  std::erase_if(next.unservable, [&](auto const& each) { return each.name == model; });
  for (auto const& each : versions) {
    put(next, {each, *its});
  }
  go_over_to(std::move(next));
  spdlog::info("model loaded on request model={} versions={}", model, versions.size());
  if (auto const why = faults({model}); !why.empty()) {
    throw error{why.front().reason.kind(),
                fmt::format("model '{}' cannot be served: {}", model, why.front().reason.what())};
  }
}

void repository_control::unload(std::string const& model) {
  std::lock_guard const lock{mutex_};
  if (!names(now_.wanted.models, model)) {
    throw error{error_kind::not_found, fmt::format("there is no model '{}'", model)};
  }
  auto next = now_without(model);
  next.unloaded.insert(model);
  go_over_to(std::move(next));
  spdlog::info("model unloaded on request model={}", model);
}

/// What comes is served before it is offered, and what goes is offered no more before it goes.
void repository_control::go_over_to(state next) {
  spdlog::info("what is served changes versions={}", next.order.size());
  auto between = next;
  bool goes = false;
  for (std::size_t at = 0; at < now_.places.size(); ++at) {
    if (next.places[at].is_retired && !now_.places[at].is_retired) {
      between.places[at] = now_.places[at];
      goes = true;
    }
  }
  carry_out(between);
  service_->offer(offered_of(next), unservable_of(next));
  service_->change_engines(engines_of(next.wanted));
  now_ = std::move(next);
  if (goes) {
    carry_out(now_);
  }
}

void repository_control::carry_out(state const& next) {
  if (!executor_->change(orders_of(next))) {
    throw error{error_kind::unavailable, "the server is shutting down"};
  }
}

/// Where some go before others it is not known what is before one.
bool repository_control::is_foretold(chosen_model const& model) {
  return model.wanted.on_miss_predicted == policy::miss_action::reject &&
         model.entry.batching.priority_levels == 0;
}

remote_executor::orders repository_control::orders_of(state const& of) const {
  remote_executor::orders made{.settings = how_.settings, .policy = of.text, .models = {}};
  made.settings["models"] = json::array();
  made.settings["unservable"] = json::array();
  auto const limit = ceil<milliseconds>(of.wanted.server.request_timeout);
  for (auto const& each : of.places) {
    auto const& name = each.is.entry.metadata.name;
    made.settings["models"].push_back({{"name", name},
                                       {"version", each.is.entry.version},
                                       {"stamp", each.stamp},
                                       {"is_retired", each.is_retired}});
    made.models.push_back({.name = name,
                           .version = each.is.entry.version,
                           .max_queue = each.is.wanted.max_queue,
                           .queue_timeout = limit,
                           .is_retired = each.is_retired,
                           .foretells = is_foretold(each.is)});
  }
  for (auto const& each : of.unservable) {
    if (each.is_wanted) {
      made.settings["unservable"].push_back(
          fmt::format("model '{}': {}", each.name, each.reason.what()));
    }
  }
  return made;
}

std::vector<offered_model> repository_control::offered_of(state const& of) {
  std::vector<chosen_model> chosen;
  chosen.reserve(of.order.size());
  for (auto const at : of.order) {
    chosen.push_back(of.places[at].is);
  }
  auto made = server::offered(chosen);
  for (std::size_t i = 0; i < made.size(); ++i) {
    made[i].place = of.order[i];
  }
  return made;
}

/// With those that have been unloaded, without those that are served as they were.
std::vector<unservable_model> repository_control::unservable_of(state const& of) const {
  auto made = of.unservable;
  for (auto const& each : of.unloaded) {
    made.push_back({each, error{error_kind::unavailable, "it has been unloaded; load it again"}});
  }
  return made;
}

std::vector<unservable_model> repository_control::faults(
    std::vector<std::string> const& models) const {
  std::vector<unservable_model> found;
  for (auto const at : now_.order) {
    auto const& name = now_.places[at].is.entry.metadata.name;
    if (std::find(models.begin(), models.end(), name) == models.end()) {
      continue;
    }
    if (auto const why = executor_->unservable(at)) {
      found.push_back({name, *why, true});
    }
  }
  return found;
}

}  // namespace sluice::server
