#include "runtime/cli/pool_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "runtime/cli/detail/json_text.hpp"
#include "runtime/cli/detail/parking_text.hpp"
#include "runtime/cli/detail/standing_text.hpp"

namespace sluice::cli {
namespace {

using detail::bytes;
using detail::field;
using detail::milliseconds_of_us;
using detail::plain;
using detail::row;
using nlohmann::json;

constexpr std::size_t chunks_a_line = 64;
constexpr std::size_t handovers_shown = 8;

std::uint64_t number(json const& value) {
  return value.is_number_unsigned() ? value.get<std::uint64_t>() : 0;
}

bool is_free(json const& run) {
  auto const owner = plain(field(run, "owner"));
  return owner == "free" || owner == "dirty";
}

char letter(json const& run) {
  auto const owner = plain(field(run, "owner"));
  return owner == "free"       ? '.'
         : owner == "dirty"    ? '-'
         : owner == "training" ? 'T'
         : owner == "serving"  ? 'S'
         : owner == "engine"   ? 'E'
                               : '?';
}

std::string map_text(json const& runs, std::uint64_t chunks) {
  std::string letters;
  for (auto const& run : runs) {
    // Never more letters than chunks, whatever a run says of its length.
    letters.append(std::min<std::uint64_t>(number(field(run, "count")), chunks - letters.size()),
                   letter(run));
  }
  auto text = fmt::format("chunks, {} a line: T training, S serving, E engine, - dirty, . free\n",
                          chunks_a_line);
  for (std::size_t first = 0; first < letters.size(); first += chunks_a_line) {
    text += fmt::format("  {:>6}  {}\n", first, letters.substr(first, chunks_a_line));
  }
  return text;
}

std::string holders_text(json const& pool, json const& runs) {
  std::map<std::tuple<std::uint64_t, std::string>, std::uint64_t> held;
  for (auto const& run : runs) {
    if (!is_free(run)) {
      held[{number(field(run, "slot")), plain(field(run, "holds"))}] += number(field(run, "count"));
    }
  }
  if (held.empty()) {
    return "holders: none\n";
  }
  auto const chunk_bytes = number(field(field(pool, "pool"), "chunk_bytes"));
  auto const& clients = field(pool, "clients");
  std::vector<row> rows{{"slot", "kind", "pid", "name", "holds", "chunks", "bytes"}};
  for (auto const& [who, count] : held) {
    auto const& [slot, what] = who;
    json client;
    for (auto const& each : clients.is_array() ? clients : json::array()) {
      if (field(each, "slot") == json(slot)) {
        client = each;
      }
    }
    rows.push_back({std::to_string(slot), plain(field(client, "kind")), plain(field(client, "pid")),
                    plain(field(client, "name")), what, std::to_string(count),
                    bytes(count * chunk_bytes)});
  }
  return "holders\n" + detail::table(rows);
}

std::string latest_handovers(json const& handovers) {
  auto const& recent = field(handovers, "recent");
  if (!recent.is_array() || recent.empty()) {
    return "handovers: none\n";
  }
  std::vector<row> rows{
      {"handover", "bytes", "notify", "gate", "drain", "revoke", "ledger", "map", "total"}};
  for (auto i = recent.size() - std::min(recent.size(), handovers_shown); i < recent.size(); ++i) {
    auto const& each = recent[i];
    row cells{plain(field(each, "seq")), bytes(field(each, "bytes"))};
    for (auto const* phase :
         {"notify_us", "gate_us", "drain_us", "revoke_us", "ledger_us", "map_us", "total_us"}) {
      cells.push_back(milliseconds_of_us(field(each, phase)));
    }
    rows.push_back(std::move(cells));
  }
  return "latest handovers\n" + detail::table(rows);
}

std::string chunks_text(json const& pool) {
  auto const& runs = field(pool, "runs");
  auto const& shape = field(pool, "pool");
  auto const listed = runs.is_array() ? runs : json::array();
  auto const free = free_summary(listed);
  return detail::pool_line(shape) + detail::host_copies_line(shape) +
         map_text(listed, number(field(shape, "chunks"))) + holders_text(pool, listed) +
         fmt::format("free: {} chunks, the longest run of neighbours {}, fragmentation {:.1f}%\n",
                     plain(free["chunks"]), plain(free["longest_run"]),
                     100.0 * free["fragmentation"].get<double>()) +
         detail::standing_text(field(pool, "clients")) +
         detail::parking_text(field(pool, "clients")) + latest_handovers(field(pool, "handovers"));
}

}  // namespace

json free_summary(json const& runs) {
  std::uint64_t free = 0;
  std::uint64_t run_length = 0;
  std::uint64_t longest = 0;
  for (auto const& run : runs.is_array() ? runs : json::array()) {
    auto const count = number(field(run, "count"));
    run_length = is_free(run) ? run_length + count : 0;
    free += is_free(run) ? count : 0;
    longest = std::max(longest, run_length);
  }
  auto const scattered =
      free == 0 ? 0.0 : 1.0 - static_cast<double>(longest) / static_cast<double>(free);
  return {{"chunks", free}, {"longest_run", longest}, {"fragmentation", scattered}};
}

std::string pool_text(json const& pools) {
  std::string text;
  for (auto const& pool : detail::several(pools)) {
    text += (text.empty() ? "" : "\n") + chunks_text(pool);
  }
  return text;
}

json pool_list(std::vector<memhandover::found_pool> const& pools) {
  auto list = json::array();
  for (auto const& pool : pools) {
    auto const readable = pool.problem.empty();
    json each{{"state", pool.orphaned() ? "orphaned"
                        : readable      ? "in use"
                                        : "unreadable"},
              {"broker_pid", nullptr},
              {"runtime_dir", pool.runtime_dir.empty() ? json{} : json(pool.runtime_dir)},
              {"clients", json::array()},
              {"others", json::array()}};
    if (readable) {
      each.update({{"id", fmt::format("{:016x}", pool.id)},
                   {"backend", to_string(pool.shape.backend)},
                   {"device", pool.shape.device},
                   {"bytes", pool.shape.bytes()}});
    } else {
      each["problem"] = pool.problem;
    }
    for (auto const& holder : pool.holders) {
      json const process{{"pid", holder.pid}, {"command", holder.command}};
      switch (holder.is) {
        case memhandover::pool_holder::role::broker:
          each["broker_pid"] = holder.pid;
          break;
        case memhandover::pool_holder::role::client:
          each["clients"].push_back(process);
          break;
        case memhandover::pool_holder::role::other:
          each["others"].push_back(process);
          break;
      }
    }
    list.push_back(std::move(each));
  }
  return list;
}

std::string pool_list_text(json const& list) {
  if (!list.is_array() || list.empty()) {
    return "pools: none\n";
  }
  auto const processes = [](json const& of) {
    std::string text;
    for (auto const& each : of.is_array() ? of : json::array()) {
      text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", plain(field(each, "pid")),
                          plain(field(each, "command")));
    }
    return text.empty() ? std::string{detail::nothing} : text;
  };
  std::vector<row> rows{
      {"pool", "state", "backend", "bytes", "broker", "runtime folder", "clients", "others"}};
  std::string problems;
  for (auto const& pool : list) {
    rows.push_back({plain(field(pool, "id")), plain(field(pool, "state")), detail::place(pool),
                    bytes(field(pool, "bytes")), plain(field(pool, "broker_pid")),
                    plain(field(pool, "runtime_dir")), processes(field(pool, "clients")),
                    processes(field(pool, "others"))});
    if (field(pool, "problem").is_string()) {
      problems += "  " + plain(field(pool, "problem")) + '\n';
    }
  }
  return "pools\n" + detail::table(rows) + problems;
}

}  // namespace sluice::cli
