#include "runtime/cli/park_commands.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "runtime/cli/detail/json_text.hpp"
#include "runtime/cli/detail/print.hpp"

namespace sluice::cli {
namespace {

using detail::print;
using nlohmann::json;
using std::chrono::steady_clock;

/// A device that is still busy then may be so for ever.
constexpr std::chrono::seconds until_gone{30};
constexpr int between_looks_ms = 20;

bool is_tenant(json const& client) {
  auto const kind = client.value("kind", "");
  return kind == "training" || kind == "engine";
}

std::string name_of(json const& client) {
  return fmt::format("{} (pid {})", client.value("name", ""), client.value("pid", 0));
}

json order_of(char const* type, found_job const& job) {
  return {{"type", type},
          {"pool_id", job.pool_id},
          {"slot", job.client.value("slot", 0)},
          {"pid", job.client.value("pid", 0)}};
}

std::vector<found_job> look(park_arguments const& arguments, std::string const& job) {
  return find_job(memhandover::query_status(arguments.runtime_dir, arguments.device), job);
}

/// The same place of the same process, as it is now.
json look_again(park_arguments const& arguments, found_job const& job) {
  auto const pid = std::to_string(job.client.value("pid", 0));
  for (auto const& each : look(arguments, pid)) {
    if (each.pool_id == job.pool_id &&
        each.client.value("slot", 0) == job.client.value("slot", 0)) {
      return each.client;
    }
  }
  throw error{error_kind::not_found, name_of(job.client) + " has left the pool"};
}

std::uint64_t bytes_in(json const& of, char const* name) {
  return of.value(name, std::uint64_t{0});
}

bool is_away(json const& client) {
  auto const parking = client.value("parking", json::object());
  return !parking.value("operator", json{}).is_null() || bytes_in(parking, "parked_bytes") > 0;
}

std::string what_stays(json const& parking) {
  std::vector<std::string> parts;
  for (auto const& each : parking.value("unparkable", json::array())) {
    parts.push_back(
        fmt::format("{} ({})", format_bytes(bytes_in(each, "bytes")), each.value("reason", "")));
  }
  return parts.empty() ? "" : fmt::format("; it keeps {}", fmt::join(parts, ", "));
}

std::string parked_text(json const& client, std::chrono::milliseconds length) {
  auto const parking = client.value("parking", json::object());
  auto const dirty = bytes_in(parking, "dirty_bytes") + bytes_in(parking, "clean_bytes");
  auto const on_disk = bytes_in(parking, "disk_bytes");
  return fmt::format(
      "{} is parked {}: {} are in host copies{}, {} held nothing{}\n", name_of(client),
      length.count() == 0
          ? "until `sluice wake`"
          : fmt::format("for {:.3g} s", std::chrono::duration<double>(length).count()),
      format_bytes(dirty),
      on_disk == 0 ? "" : fmt::format(" ({} of it on disk)", format_bytes(on_disk)),
      format_bytes(bytes_in(parking, "zero_bytes")), what_stays(parking));
}

}  // namespace

std::vector<found_job> find_job(json const& status, std::string const& job) {
  std::vector<found_job> by_pid;
  std::vector<found_job> jobs;
  std::vector<std::string> names;
  for (auto const& each : detail::several(status)) {
    auto const id = std::stoull(each.at("pool").value("id", "0"), nullptr, 16);
    for (auto const& client : each.value("clients", json::array())) {
      bool const is_it = std::to_string(client.value("pid", 0)) == job;
      if (is_it && !is_tenant(client)) {
        throw error{error_kind::unsupported,
                    fmt::format("{} is of the kind {}; only training jobs and engines are parked",
                                name_of(client), client.value("kind", ""))};
      }
      if (!is_tenant(client) || client.value("state", "") == "gone") {
        continue;
      }
      if (is_it) {
        by_pid.push_back({id, client});
      }
      names.push_back(name_of(client));
      if (client.value("name", "") == job) {
        jobs.push_back({id, client});
      }
    }
  }
  if (!by_pid.empty()) {
    jobs = std::move(by_pid);
  }
  if (jobs.empty()) {
    throw error{error_kind::not_found,
                fmt::format("no job or engine has the pid or the name {}; {}", job,
                            names.empty() ? "there is none"
                                          : fmt::format("there are {}", fmt::join(names, ", ")))};
  }
  std::set<std::pair<int, std::string>> processes;
  std::set<int> pids;
  for (auto const& each : jobs) {
    auto const pid = each.client.value("pid", 0);
    processes.emplace(pid, each.client.value("pid_namespace", json{}).dump());
    pids.insert(pid);
  }
  if (processes.size() > 1) {
    throw error{error_kind::invalid_argument,
                fmt::format("several jobs have the name {}; give one of the pids {}", job,
                            fmt::join(pids, ", "))};
  }
  std::stable_partition(jobs.begin(), jobs.end(), [](found_job const& each) {
    return each.client.value("elastic", json{}).is_object();
  });
  return jobs;
}

namespace {

void park_one(park_arguments const& arguments, found_job const& job) {
  auto order = order_of("park", job);
  order["for_ms"] = arguments.length.count();
  memhandover::give_order(arguments.runtime_dir, order);
  auto const pid = std::to_string(job.client.value("pid", 0));
  for (auto const until = steady_clock::now() + until_gone;; ::poll(nullptr, 0, between_looks_ms)) {
    auto const now = look_again(arguments, job);
    auto const& by_operator = now.at("parking").at("operator");
    if (by_operator.is_null()) {
      throw error{error_kind::cancelled,
                  fmt::format("{} has been woken before it was parked", name_of(now))};
    }
    if (by_operator.value("done", false)) {
      print(parked_text(now, arguments.length));
      return;
    }
    if (steady_clock::now() >= until) {
      throw error{
          error_kind::deadline_exceeded,
          fmt::format(
              "{} has not been parked within {} s: {}. The order stands; `sluice wake {}` takes it "
              "back",
              name_of(now), until_gone.count(),
              now.value("stopped", false)
                  ? fmt::format(
                        "it is stopped (SIGSTOP, or a debugger), and `kill -CONT {}` lets it go on",
                        pid)
                  : "its device does not come to rest, since a kernel goes on for ever or waits "
                    "for another process",
              pid)};
    }
  }
}

void wake_one(park_arguments const& arguments, found_job const& job) {
  memhandover::give_order(arguments.runtime_dir, order_of("wake", job));
  auto const needed = bytes_in(job.client.value("parking", json::object()), "parked_bytes");
  print(fmt::format(
      "{} comes back {}\n", name_of(job.client),
      needed == 0 ? "at once" : fmt::format("when the pool has {} for it", format_bytes(needed))));
}

}  // namespace

int park(park_arguments const& arguments) {
  for (auto const& each : look(arguments, arguments.job)) {
    park_one(arguments, each);
  }
  return 0;
}

int wake(park_arguments const& arguments) {
  auto const jobs = look(arguments, arguments.job);
  bool const some_are_away =
      std::any_of(jobs.begin(), jobs.end(), [](auto const& each) { return is_away(each.client); });
  for (auto const& each : jobs) {
    if (is_away(each.client) || !some_are_away) {
      wake_one(arguments, each);
    }
  }
  return 0;
}

}  // namespace sluice::cli
