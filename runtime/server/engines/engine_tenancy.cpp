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
  made.comes = parking.value("wanted", false);
  made.is_held = !order.is_null();
  made.waits = client.value("state", "") == "waiting";
  made.is_gone = made.is_held && order.value("done", false);
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
  launcher::refuse_memory_outside(own, how_.pool);
  auto const parts = launcher::parts_for_sharing(how_.installed, options, how_.pool);
  return launcher::sharing_environment(std::move(own), parts, options, how_.pool);
}

engine_share engine_tenancy::look(pid_t root) const {
  return share_of(how_.look(), root);
}

void engine_tenancy::park(engine_share const& who) const {
  for (auto const& each : who.members) {
    if (!each.is_held) {
      how_.order(order_of("park", each));
    }
  }
}

void engine_tenancy::wake(engine_share const& who) const {
  for (auto const& each : who.members) {
    if (!each.is_held && (each.parked_bytes == 0 || each.comes)) continue;
    try {
      how_.order(order_of("wake", each));
    } catch (error const& why) {
      if (why.kind() != error_kind::not_found) throw;  // it has ended, or has been woken already
    }
  }
}

}  // namespace sluice::server
