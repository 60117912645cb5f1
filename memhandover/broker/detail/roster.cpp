#include "memhandover/broker/detail/roster.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>

#include "memhandover/base/processes.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/broker/conversation.hpp"

namespace sluice::memhandover::detail {
namespace {

std::string roster_path(std::string const& runtime_dir) {
  return runtime_dir + "/pool.json";
}

/// One that cannot be seen may live.
bool lives(nlohmann::json const& user) {
  try {
    auto const who = identity_in(user);
    return is_foreign(who) || open_process(who.pid, who.start_ticks);
  } catch (error const&) {
    return false;
  }
}

}  // namespace

void write_roster(std::string const& runtime_dir, std::vector<roster_entry> const& pools) {
  auto list = nlohmann::json::array();
  for (auto const& pool : pools) {
    list.push_back({{"id", pool.pool_id}, {"clients", pool.users}});
  }
  auto const path = roster_path(runtime_dir);
  std::ofstream file{path + ".new", std::ios::trunc};
  file << nlohmann::json{{"pools", list}}.dump();
  file.close();
  // One that is cut short would say that nobody uses the pools: then rather the last one.
  if (!file || ::rename((path + ".new").c_str(), path.c_str()) != 0) {
    spdlog::warn("cannot write {} reason=\"{}\"", path, reason_of(errno));
  }
}

bool is_in_use(roster_entry const& pool) {
  return std::any_of(pool.users.begin(), pool.users.end(), lives);
}

std::vector<roster_entry> pools_in_use(std::string const& runtime_dir) {
  std::ifstream file{roster_path(runtime_dir)};
  auto const roster = nlohmann::json::parse(file, nullptr, false);
  std::vector<roster_entry> in_use;
  if (!roster.is_object() || !roster.contains("pools") || !roster["pools"].is_array()) {
    return in_use;
  }
  for (auto const& pool : roster["pools"]) {
    if (pool.is_object() && pool.contains("id") && pool["id"].is_number_unsigned() &&
        pool.contains("clients") && pool["clients"].is_array()) {
      roster_entry const found{pool["id"].get<std::uint64_t>(), pool["clients"]};
      if (is_in_use(found)) {
        in_use.push_back(found);
      }
    }
  }
  return in_use;
}

}  // namespace sluice::memhandover::detail
