#include "memhandover/ledger/pool_status.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/base/shared_text.hpp"
#include "memhandover/ledger/chunk_counts.hpp"
#include "memhandover/ledger/chunk_notes.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/standing.hpp"

namespace sluice::memhandover {
namespace {

using json = nlohmann::json;

/// Nearest-rank percentile of sorted values.
double percentile(std::vector<double> const& sorted, double share) {
  auto const rank =
      static_cast<std::size_t>(std::lround(share * static_cast<double>(sorted.size() - 1)));
  return sorted.at(rank);
}

json describe_long_units(mailbox_header const& mailbox) {
  json units = json::array();
  for (auto const& unit : mailbox.long_units) {
    if (auto const times = unit.times.load(); times > 0) {
      units.push_back({{"name", readable_text(load_text(unit.name))},
                       {"us", static_cast<double>(unit.nanoseconds.load()) / 1000.0},
                       {"times", times}});
    }
  }
  return units;
}

json describe_handovers(ledger_header const& header) {
  std::vector<std::pair<std::uint64_t, json>> entries;
  std::vector<double> totals;
  for (auto const& entry : header.recent) {
    auto const seq = entry.seq.load(std::memory_order_acquire);
    if (seq == 0) {
      continue;
    }
    auto us = [](std::atomic<std::uint64_t> const& ns) {
      return static_cast<double>(ns.load()) / 1000.0;
    };
    entries.emplace_back(seq, json{{"seq", seq},
                                   {"bytes", entry.bytes.load()},
                                   {"notify_us", us(entry.notify_ns)},
                                   {"gate_us", us(entry.gate_ns)},
                                   {"drain_us", us(entry.drain_ns)},
                                   {"revoke_us", us(entry.revoke_ns)},
                                   {"ledger_us", us(entry.ledger_ns)},
                                   {"map_us", us(entry.map_ns)},
                                   {"total_us", us(entry.total_ns)},
                                   {"parked_bytes", entry.parked_bytes.load()},
                                   {"park_closing_us", us(entry.park_closing_ns)},
                                   {"park_idle_us", us(entry.park_idle_ns)},
                                   {"park_out_us", us(entry.park_out_ns)}});
    totals.push_back(us(entry.total_ns));
  }
  std::sort(entries.begin(), entries.end(),
            [](auto const& a, auto const& b) { return a.first < b.first; });
  json recent = json::array();
  constexpr std::size_t shown = 64;
  for (std::size_t i = entries.size() > shown ? entries.size() - shown : 0; i < entries.size();
       ++i) {
    recent.push_back(std::move(entries[i].second));
  }
  json latency{{"n", totals.size()}};
  if (!totals.empty()) {
    std::sort(totals.begin(), totals.end());
    latency["p50"] = percentile(totals, 0.5);
    latency["p90"] = percentile(totals, 0.9);
    latency["p99"] = percentile(totals, 0.99);
    latency["max"] = totals.back();
  }
  return {{"count", header.handovers.load()},
          {"bytes_to_serving", header.bytes_to_serving.load()},
          {"bytes_to_training", header.bytes_to_training.load()},
          {"bytes_to_engines", header.bytes_to_engines.load()},
          {"latency_us", std::move(latency)},
          {"recent", std::move(recent)}};
}

/// Zero stands for no bound.
std::optional<std::chrono::nanoseconds> run_ahead_of(mailbox_header const& mailbox) {
  auto const bound = mailbox.run_ahead_ns.load(std::memory_order_relaxed);
  return bound == 0 ? std::nullopt
                    : std::optional{std::chrono::nanoseconds{static_cast<std::int64_t>(bound)}};
}

std::chrono::nanoseconds discarded_of(mailbox_header const& mailbox) {
  auto const count = mailbox.discarded_ns.load();
  return std::chrono::nanoseconds{
      static_cast<std::int64_t>(std::min(count, std::uint64_t{1} << 62U))};
}

json microseconds_or_null(std::optional<std::chrono::nanoseconds> span) {
  return span ? json(std::chrono::duration<double, std::micro>{*span}.count()) : json{};
}

/// Who has a chunk, and what for.
struct holder {
  owner who = owner::free;
  std::optional<std::uint32_t> slot;
  std::string what;

  bool operator==(holder const&) const = default;
};

holder holder_of(ledger_view const& view, std::uint32_t chunk) {
  auto const state = view.chunk(chunk);
  if (!is_owned(state.who) || state.client >= max_clients) {
    return {state.who, std::nullopt, {}};
  }
  return {state.who, state.client, readable_text(chunk_note(view, state.client, chunk))};
}

std::uint64_t since(std::int64_t begin_ns, std::int64_t now_ns) {
  return static_cast<std::uint64_t>(std::max<std::int64_t>(0, now_ns - begin_ns));
}

char const* name_of(unparkable why) noexcept {
  switch (why) {
    case unparkable::never:
      return "never";
    case unparkable::communicators:
      return "communicators of NCCL";
    case unparkable::no_host_copies:
      return "no host copies";
    case unparkable::pinning:
      return "host copies are being pinned";
    case unparkable::refused:
      return "refused by driver or system";
    case unparkable::none:
      break;
  }
  return "unknown";
}

/// Of what a client keeps, what no demand has parked, by reason; each chunk counts once.
json describe_unparkable(ledger_header const& header, mailbox_header const& mailbox) {
  json list = json::array();
  if (mailbox.elastic.load() != 0) {
    return list;  // an order takes all
  }
  auto const kept = mailbox.kept_chunks.load();
  auto const parkable = std::min(kept, mailbox.parkable_chunks.load());
  auto const add = [&](char const* why, std::uint32_t chunks) {
    if (chunks > 0) {
      list.push_back({{"reason", why}, {"bytes", chunks * header.chunk_bytes}});
    }
  };
  if (auto const why = unparkable{mailbox.why_unparkable.load()}; why != unparkable::none) {
    add(name_of(why), kept);
    return list;
  }
  add(mailbox.disk_fault.load() == 0 ? "host copies are full" : "the disk of host copies failed",
      kept - parkable);
  if (header.serving_now.load() != 0 && header.park_stay.load() == 0) {
    add("training.park of the server", parkable);
  } else if (mailbox.stays_until_ns.load() > monotonic_ns()) {
    add("came back a moment ago", parkable);
  }
  return list;
}

/// For how long it is parked because an operator wants it; null if none does.
json describe_hold(client_entry const& entry, mailbox_header const& mailbox) {
  auto const until = entry.held_until_ns.load();
  if (!is_held(entry)) {
    return nullptr;
  }
  auto const left_ns = until - static_cast<std::uint64_t>(monotonic_ns());
  return {{"done", mailbox.obeys.load() != 0},
          {"left_s", until == until_woken ? json{} : json(static_cast<double>(left_ns) / 1e9)}};
}

/// What a client says of its memory that is, or could be, in host copies.
json describe_parking(ledger_header const& header, client_entry const& entry,
                      mailbox_header const& mailbox) {
  auto const chunk_bytes = header.chunk_bytes;
  auto const away_since = mailbox.away_since_ns.load();
  auto const now_ns = monotonic_ns();
  auto const ms_until = [now_ns](std::int64_t at_ns) {
    return static_cast<double>(std::max<std::int64_t>(0, at_ns - now_ns)) / 1e6;
  };
  auto const ms = [](std::uint64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e6; };
  auto const owed_ns = mailbox.owed_ns.load();
  auto const waits_ns = mailbox.waits_since_ns.load();
  auto const window_ns = mailbox.window_ns.load();
  auto const window_away_ns = std::min(window_ns, mailbox.window_away_ns.load());
  auto const away_now = away_since == 0 ? 0 : since(away_since, now_ns);
  auto const us = [](std::uint64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e3; };
  auto const parked = mailbox.parked_chunks.load();
  auto const dirty = std::min(parked, mailbox.parked_dirty.load());
  auto const clean = std::min(parked - dirty, mailbox.parked_clean.load());
  return {{"parked_bytes", parked * chunk_bytes},
          {"dirty_bytes", dirty * chunk_bytes},
          {"clean_bytes", clean * chunk_bytes},
          {"zero_bytes", (parked - dirty - clean) * chunk_bytes},
          {"disk_bytes", std::min(dirty + clean, mailbox.parked_disk.load()) * chunk_bytes},
          {"parkable_bytes", mailbox.parkable_chunks.load() * chunk_bytes},
          {"unparkable", describe_unparkable(header, mailbox)},
          {"wanted", away_since != 0 && mailbox.waiting.load() != 0},
          {"operator", describe_hold(entry, mailbox)},
          {"parks", mailbox.parks.load()},
          {"out_us", us(mailbox.park_ns.load())},
          {"in_us", us(mailbox.unpark_ns.load())},
          {"away_us", us(mailbox.parked_ns.load() + away_now)},
          {"window_ms", ms(window_ns)},
          {"away_ms", ms(window_away_ns)},
          {"resident_ms", ms(window_ns - window_away_ns)},
          {"stays_ms", ms_until(mailbox.stays_until_ns.load())},
          {"waits_ms", waits_ns == 0 ? json{} : json(ms(since(waits_ns, now_ns)))},
          {"owed_in_ms", owed_ns == 0 ? json{} : json(ms_until(owed_ns))},
          {"missed_us", us(mailbox.missed_ns.load())}};
}

/// What a training job says of itself.
json describe_training(ledger_header const& header, client_entry const& entry,
                       mailbox_header const& mailbox) {
  auto const chunk_bytes = header.chunk_bytes;
  auto const standing = standing_of(entry, header.chunk_count);
  return {{"priority", name_of(standing.rank)},
          {"min_bytes", standing.least_chunks * chunk_bytes},
          {"arena_bytes", mailbox.arena_chunks.load() * chunk_bytes},
          {"spare_bytes", mailbox.spare_chunks.load() * chunk_bytes},
          {"persistent_bytes", mailbox.persistent_chunks.load() * chunk_bytes},
          {"kept_bytes", mailbox.kept_chunks.load() * chunk_bytes},
          {"stranded_bytes", mailbox.stranded_chunks.load() * chunk_bytes},
          {"parking", describe_parking(header, entry, mailbox)},
          {"micro_batch", mailbox.micro_batch.load()},
          {"global_batch", mailbox.global_batch.load()},
          {"run_ahead_us", microseconds_or_null(run_ahead_of(mailbox))},
          {"long_units", describe_long_units(mailbox)},
          {"samples", mailbox.samples.load()},
          {"commits", mailbox.commits.load()},
          {"discards", mailbox.discards.load()},
          {"discarded_us", microseconds_or_null(discarded_of(mailbox))}};
}

/// Chunks of one client by what it says that they hold; "" where it has said nothing.
using holdings = std::map<std::string, std::uint32_t>;

/// The largest by name, the rest together under null.
json describe_holdings(holdings const& of, std::uint64_t chunk_bytes) {
  constexpr std::size_t most_named = 8;
  std::vector<std::pair<std::string, std::uint32_t>> named{of.begin(), of.end()};
  std::stable_sort(named.begin(), named.end(), [](auto const& a, auto const& b) {
    return a.first.empty() != b.first.empty() ? b.first.empty() : a.second > b.second;
  });
  json list = json::array();
  std::uint64_t rest = 0;
  for (auto const& [what, chunks] : named) {
    if (what.empty() || list.size() == most_named) {
      rest += chunks;
    } else {
      list.push_back({{"holds", readable_text(what)}, {"bytes", chunks * chunk_bytes}});
    }
  }
  if (rest > 0) {
    list.push_back({{"holds", nullptr}, {"bytes", rest * chunk_bytes}});
  }
  return list;
}

char const* state_of(client_entry const& entry, mailbox_header const& mailbox) {
  if (has_status(entry, client_status::gone)) {
    return "gone";
  }
  switch (park_state{mailbox.where_parked.load()}) {
    case park_state::closing:
      return "closing";
    case park_state::going:
      return "going";
    case park_state::parked:
      return "parked";
    case park_state::coming_back:
      return "coming back";
    case park_state::resident:
      break;
  }
  return mailbox.waiting.load() != 0 ? "waiting" : "running";
}

/// The client in `slot`, which has so many `chunks`; `held` is what it says of an engine's.
json describe_client(ledger_view const& view, std::uint32_t slot, std::uint32_t chunks,
                     holdings const& held) {
  auto const& entry = view.clients()[slot];
  auto const& mailbox = view.mailbox(slot);
  auto const chunk_bytes = view.header().chunk_bytes;
  auto const kind = entry.kind.load();
  json client{
      {"slot", slot},
      {"kind", name_of_kind(kind)},
      {"pid", entry.pid.load()},
      {"pid_namespace", is_foreign(process_of(entry)) ? json(entry.pid_namespace.load()) : json{}},
      {"name", readable_text(text_of(entry.name))},
      {"state", state_of(entry, mailbox)},
      {"stopped", is_stopped(process_of(entry))},
      {"bytes", chunks * chunk_bytes}};
  switch (static_cast<client_kind>(kind)) {
    case client_kind::training:
      client.update(describe_training(view.header(), entry, mailbox));
      break;
    case client_kind::server:
      client["endpoint"] = readable_text(text_of(entry.endpoint));
      break;
    case client_kind::engine:
      client["arena_bytes"] = mailbox.arena_chunks.load() * chunk_bytes;
      client["persistent_bytes"] = mailbox.persistent_chunks.load() * chunk_bytes;
      client["kept_bytes"] = mailbox.kept_chunks.load() * chunk_bytes;
      client["in_use"] = entry.in_use.load() != 0;
      client["works"] = mailbox.works_until_ns.load() > monotonic_ns();
      client["worked_us"] = static_cast<double>(mailbox.worked_ns.load()) / 1e3;
      client["elastic"] =
          mailbox.elastic.load() != 0 ? json{{"used_bytes", mailbox.used_bytes.load()}} : json{};
      client["parking"] = describe_parking(view.header(), entry, mailbox);
      client["holdings"] = describe_holdings(held, chunk_bytes);
      break;
  }
  return client;
}

}  // namespace

nlohmann::json describe_chunks(ledger_view const& view, std::uint32_t from, std::size_t most_runs) {
  json runs = json::array();
  holder last;
  std::uint32_t count = 0;
  std::uint32_t chunk = from;
  for (; chunk < view.header().chunk_count; ++chunk) {
    auto now = holder_of(view, chunk);
    if (runs.empty() || now != last) {
      if (runs.size() == most_runs) {
        break;
      }
      json run{{"first", chunk}, {"owner", name_of(now.who)}};
      if (now.slot) {
        run["slot"] = *now.slot;
        run["holds"] = now.what.empty() ? json{} : json(now.what);
      }
      runs.push_back(std::move(run));
      last = std::move(now);
      count = 0;
    }
    runs.back()["count"] = ++count;
  }
  return {{"runs", std::move(runs)},
          {"next", chunk < view.header().chunk_count ? json(chunk) : json{}}};
}

nlohmann::json describe_pool(ledger_view const& view) {
  auto const& header = view.header();
  std::array<holdings, max_clients> held;
  auto const counted = count_chunks(view, [&](std::uint32_t chunk, chunk_state const& state) {
    if (state.who == owner::engine && state.client < max_clients) {
      ++held.at(state.client)[chunk_note(view, state.client, chunk)];
    }
  });
  auto const bytes = [&header](std::uint32_t chunks) { return chunks * header.chunk_bytes; };
  json clients = json::array();
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (!has_status(view.clients()[slot], client_status::empty)) {
      clients.push_back(describe_client(view, slot, counted.by_client.at(slot), held.at(slot)));
    }
  }
  return {{"pool",
           {{"id", hexadecimal(header.pool_id)},
            {"backend", to_string(view.shape().backend)},
            {"device", header.device},
            {"gpu", view.shape().backend == backend_kind::cuda
                        ? nlohmann::json(to_string(view.shape().gpu))
                        : nlohmann::json()},
            {"chunk_bytes", header.chunk_bytes},
            {"chunks", header.chunk_count},
            {"bytes", header.chunk_bytes * header.chunk_count},
            {"free_bytes", bytes(counted.free)},
            {"dirty_bytes", bytes(counted.dirty)},
            {"training_bytes", bytes(counted.training)},
            {"serving_bytes", bytes(counted.serving)},
            {"engine_bytes", bytes(counted.engine)},
            {"left_bytes", bytes(counted.left)},
            {"grantable_bytes", header.grantable.load() * header.chunk_bytes},
            {"run_ahead_us", microseconds_or_null(published_run_ahead(header))},
            {"writer", view.writer_slot() == broker_slot ? "broker" : "server"},
            {"broker_pid", ::getpid()}}},
          {"clients", std::move(clients)},
          {"handovers", describe_handovers(header)}};
}

}  // namespace sluice::memhandover
