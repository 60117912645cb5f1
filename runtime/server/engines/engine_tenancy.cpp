#include "runtime/server/engines/engine_tenancy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "runtime/launcher/descendants.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;

std::uint64_t sum(std::vector<engine_member> const& of, std::uint64_t engine_member::*what) {
  return std::accumulate(
      of.begin(), of.end(), std::uint64_t{0},
      [what](std::uint64_t before, engine_member const& each) { return before + each.*what; });
}

bool caches_have_gone(std::vector<engine_member> const& members) {
  return std::all_of(members.begin(), members.end(),
                     [](engine_member const& each) { return !each.is_elastic || each.is_gone; });
}

bool is_member(json const& client, pid_t root) {
  return client.value("kind", "") == "engine" && client.value("state", "") != "gone" &&
         client.at("pid_namespace").is_null() &&  // else its pid is another process's here
         launcher::is_of_tree(client.value("pid", 0), root);
}

engine_member member_of(json const& client, std::uint64_t pool_id) {
  auto const& parking = client.at("parking");
  auto const& order = parking.at("operator");
  engine_member made;
  made.pool_id = pool_id;
  made.slot = client.value("slot", 0U);
  made.pid = client.value("pid", 0);
  made.resident_bytes = client.value("bytes", std::uint64_t{0});
  made.parked_bytes = parking.value("parked_bytes", std::uint64_t{0});
  made.parks = parking.value("parks", std::uint64_t{0});
  made.worked_us = client.value("worked_us", 0.0);
  made.comes = parking.value("wanted", false);
  made.is_held = !order.is_null();
  made.in_use = client.value("in_use", false);
  made.waits = client.value("state", "") == "waiting";
  made.is_gone = made.is_held && order.value("done", false);
  if (auto const elastic = client.value("elastic", json{}); elastic.is_object()) {
    made.is_elastic = true;
    made.used_bytes = elastic.value("used_bytes", std::uint64_t{0});
  }
  return made;
}

/// As somebody who could not get memory of it is told.
std::string text_of(json const& pool) {
  auto const bytes = [&pool](char const* name) {
    return format_bytes(pool.value(name, std::uint64_t{0}));
  };
  return fmt::format(
      "of the pool's {} training holds {}, models hold {}, engines hold {}, and {} "
      "are free for it",
      bytes("bytes"), bytes("training_bytes"), bytes("serving_bytes"), bytes("engine_bytes"),
      bytes("grantable_bytes"));
}

json order_of(char const* type, engine_member const& to) {
  return {{"type", type}, {"pool_id", to.pool_id}, {"slot", to.slot}, {"pid", to.pid}};
}

}  // namespace

std::uint64_t engine_share::resident_bytes() const noexcept {
  return sum(members, &engine_member::resident_bytes);
}
std::uint64_t engine_share::parked_bytes() const noexcept {
  return sum(members, &engine_member::parked_bytes);
}
std::uint64_t engine_share::parks() const noexcept {
  return sum(members, &engine_member::parks);
}
std::chrono::duration<double, std::micro> engine_share::worked() const noexcept {
  return std::chrono::duration<double, std::micro>{std::accumulate(
      members.begin(), members.end(), 0.0,
      [](double before, engine_member const& each) { return before + each.worked_us; })};
}
bool engine_share::waits() const noexcept {
  return std::any_of(members.begin(), members.end(),
                     [](engine_member const& each) { return each.waits; });
}
bool engine_share::is_held() const noexcept {
  return std::any_of(members.begin(), members.end(),
                     [](engine_member const& each) { return each.is_held; });
}
bool engine_share::is_away() const noexcept {
  return std::all_of(members.begin(), members.end(),
                     [](engine_member const& each) { return each.is_gone; });
}
bool engine_share::awaits_order() const noexcept {
  return caches_have_gone(members) &&
         std::any_of(members.begin(), members.end(),
                     [](engine_member const& each) { return !each.is_held; });
}
std::optional<engine_share::cache> engine_share::kv() const noexcept {
  std::optional<cache> all;
  for (auto const& each : members) {
    if (!each.is_elastic) continue;
    if (!all) all.emplace();
    all->bytes += each.resident_bytes;
    all->used_bytes += each.used_bytes;
  }
  return all;
}
bool engine_share::is_noted(bool in_use) const noexcept {
  return std::all_of(members.begin(), members.end(),
                     [in_use](engine_member const& each) { return each.in_use == in_use; });
}
bool engine_share::is_back() const noexcept {
  return std::all_of(members.begin(), members.end(), [](engine_member const& each) {
    return !each.is_held && each.parked_bytes == 0;
  });
}

engine_share share_of(json const& status, pid_t root) {
  engine_share made;
  auto const several = status.find("pools");
  auto const pools = several == status.end() ? json::array({status}) : *several;
  for (auto const& pool : pools) {
    auto const& facts = pool.at("pool");
    auto const id = std::stoull(facts.value("id", "0"), nullptr, 16);
    auto const before = made.members.size();
    for (auto const& client : pool.value("clients", json::array())) {
      if (is_member(client, root)) made.members.push_back(member_of(client, id));
    }
    if (made.members.size() > before) made.pool_text = text_of(facts);
  }
  return made;
}

engine_tenancy::engine_tenancy(access how) : how_(std::move(how)) {}

launcher::environment engine_tenancy::environment_of(policy::model_policy const& engine,
                                                     launcher::environment own) const {
  launcher::run_options options;
  options.name = engine.name;
  options.role = "engine";
  options.park = engine.warm.mode == policy::warm_mode::always ? "never" : "if_needed";
  options.backend = how_.pool.backend;
  options.device = how_.device;
  auto const& is = *engine.engine;
  if (is.memory == policy::engine_memory::pool) {
    launcher::refuse_memory_outside(own, how_.pool);
    auto const parts = launcher::parts_for_sharing(how_.installed, options, how_.pool);
    own = launcher::sharing_environment(std::move(own), parts, options, how_.pool);
  }
  if (is.kv == policy::engine_cache::pool) {
    if (how_.pool.backend != "host") {
      throw error{
          error_kind::unsupported,
          fmt::format("its policy says kv: pool, and a KV cache out of the pool is there for "
                      "the backend host alone so far; this pool's is {}. Remove kv",
                      how_.pool.backend)};
    }
    own = launcher::cache_environment(std::move(own), how_.installed, options, how_.pool);
  }
  return own;
}

engine_share engine_tenancy::look(pid_t root) const {
  return share_of(how_.look(), root);
}

std::vector<engine_share> engine_tenancy::look(std::vector<pid_t> const& roots) const {
  auto const status = how_.look();
  std::vector<engine_share> made;
  made.reserve(roots.size());
  for (auto const root : roots) made.push_back(share_of(status, root));
  return made;
}

void engine_tenancy::park(engine_share const& who) const {
  bool const all = caches_have_gone(who.members);
  for (auto const& each : who.members) {
    if (!each.is_held && (all || each.is_elastic)) {
      how_.order(order_of("park", each));
    }
  }
}

void engine_tenancy::wake(engine_share const& who) const {
  for (auto const& each : who.members) {
    if (!each.is_held && (each.parked_bytes == 0 || each.comes)) continue;
    give(order_of("wake", each));  // it may have been woken already
  }
}

void engine_tenancy::note(engine_share const& who, bool in_use) const {
  for (auto const& each : who.members) {
    if (each.in_use == in_use) continue;
    auto order = order_of("use", each);
    order["in_use"] = in_use;
    give(order);
  }
}

/// An order that nobody needs any more where who it is for has ended.
void engine_tenancy::give(json const& order) const {
  try {
    how_.order(order);
  } catch (error const& why) {
    if (why.kind() != error_kind::not_found) throw;
  }
}

}  // namespace sluice::server
