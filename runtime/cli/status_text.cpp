#include "runtime/cli/status_text.hpp"

#include <fmt/format.h>

#include <cmath>
#include <string_view>
#include <vector>

#include "runtime/cli/detail/json_text.hpp"
#include "runtime/cli/detail/parking_text.hpp"
#include "runtime/cli/detail/standing_text.hpp"

namespace sluice::cli {
namespace {

using detail::bytes;
using detail::field;
using detail::milliseconds_of_us;
using detail::nothing;
using detail::plain;
using detail::row;
using detail::table;
using nlohmann::json;

std::string percent(json const& value) {
  return value.is_number() ? fmt::format("{:.1f}%", value.get<double>() * 100.0) : plain(value);
}

/// A model that is never released has no number here, and JSON no infinity.
std::string idle_timeout(json const& model) {
  auto const& value = field(model, "idle_timeout_s");
  if (value.is_number()) {
    return fmt::format("{:.3g} s", value.get<double>());
  }
  return model.contains("idle_timeout_s") ? "never" : nothing;
}

std::string owners_text(json const& pool) {
  auto share = [&pool](std::string_view name) {
    auto const& part = field(pool, name);
    auto const& whole = field(pool, "bytes");
    if (!part.is_number() || !whole.is_number() || whole.get<double>() <= 0) {
      return std::string{nothing};
    }
    return fmt::format("{:.1f}%", 100.0 * part.get<double>() / whole.get<double>());
  };
  std::vector<row> rows{{"owner", "bytes", "share"}};
  for (auto const* owner : {"free", "dirty", "training", "serving", "engine"}) {
    auto const name = std::string{owner} + "_bytes";
    rows.push_back({owner, bytes(field(pool, name)), share(name)});
  }
  if (auto const& left = field(pool, "left_bytes"); left.is_number() && left != json(0)) {
    rows.push_back({"  left by a dead server", bytes(left), share("left_bytes")});
  }
  auto const& warning = field(pool, "warning");
  return detail::pool_line(pool) + table(rows) +
         (warning.is_string() ? "  warning: " + plain(warning) + '\n' : std::string{}) +
         detail::host_copies_line(pool);
}

std::string clients_text(json const& clients) {
  if (!clients.is_array() || clients.empty()) {
    return "clients: none\n";
  }
  std::vector<row> rows{{"slot", "kind", "pid", "name", "state", "bytes", "arena", "persistent",
                         "micro-batch", "global batch", "samples", "commits", "discards",
                         "discarded"}};
  for (auto const& client : clients) {
    auto cell = [&client](char const* name) { return plain(field(client, name)); };
    rows.push_back({cell("slot"), cell("kind"), cell("pid"), cell("name"), cell("state"),
                    bytes(field(client, "bytes")), bytes(field(client, "arena_bytes")),
                    bytes(field(client, "persistent_bytes")), cell("micro_batch"),
                    cell("global_batch"), cell("samples"), cell("commits"), cell("discards"),
                    milliseconds_of_us(field(client, "discarded_us"))});
  }
  return "clients\n" + table(rows);
}

/// What engines say that their chunks hold.
std::string holdings_text(json const& clients) {
  std::vector<row> rows{{"slot", "holds", "bytes"}};
  for (auto const& client : clients.is_array() ? clients : json::array()) {
    auto const& holdings = field(client, "holdings");
    for (auto const& each : holdings.is_array() ? holdings : json::array()) {
      rows.push_back(
          {plain(field(client, "slot")), plain(field(each, "holds")), bytes(field(each, "bytes"))});
    }
  }
  return rows.size() > 1 ? "engines\n" + table(rows) : std::string{};
}

/// What jobs keep that cannot be parked, and why; unless nobody could want it, since there is no host memory for it.
std::string unparkable_text(json const& status) {
  if (!field(field(status, "pool"), "host_copies").is_object()) {
    return {};
  }
  std::vector<row> rows{{"slot", "bytes", "reason"}};
  auto const& clients = field(status, "clients");
  for (auto const& client : clients.is_array() ? clients : json::array()) {
    auto const& reasons = field(field(client, "parking"), "unparkable");
    for (auto const& each : reasons.is_array() ? reasons : json::array()) {
      rows.push_back({plain(field(client, "slot")), bytes(field(each, "bytes")),
                      plain(field(each, "reason"))});
    }
  }
  return rows.size() > 1 ? "cannot be parked\n" + table(rows) : std::string{};
}

/// What a pause may have to wait for.
std::string long_units_text(json const& clients) {
  std::vector<row> rows{{"slot", "takes", "launched", "unit"}};
  if (clients.is_array()) {
    for (auto const& client : clients) {
      auto const& units = field(client, "long_units");
      for (std::size_t i = 0; units.is_array() && i < units.size(); ++i) {
        rows.push_back({plain(field(client, "slot")), milliseconds_of_us(field(units[i], "us")),
                        plain(field(units[i], "times")), plain(field(units[i], "name"))});
      }
    }
  }
  return rows.size() > 1 ? "units longer than run-ahead\n" + table(rows) : std::string{};
}

std::string server_text(json const& status) {
  auto const& server = field(status, "server");
  if (!server.is_object()) {
    return "server: none\n";
  }
  if (field(server, "answers") == json(false)) {
    return fmt::format("server: {} does not answer: {}\n", plain(field(server, "endpoint")),
                       plain(field(server, "error")));
  }
  auto const& requests = field(status, "requests");
  auto const& latency = field(status, "latency_ms");
  auto at = [&latency](char const* temperature, char const* quantile) -> std::string {
    auto const& times = field(latency, temperature);
    auto const& value = field(times, quantile);
    bool const measured = value.is_number() && field(times, "n") != json(0);
    return measured ? fmt::format("{:.1f} ms", value.get<double>()) : nothing;
  };
  auto const& scheme = field(server, "scheme");
  auto const& grpc = field(server, "grpc_endpoint");
  bool const has_grpc = grpc.is_string() && grpc != json("");
  return fmt::format("server: {}://{}{}, {}\n", scheme.is_string() ? plain(scheme) : "http",
                     plain(field(server, "endpoint")),
                     has_grpc ? fmt::format(", gRPC on {}", plain(grpc)) : "",
                     plain(field(server, "state"))) +
         table({{"requests", "failed", "in flight", "warm p50", "warm p99", "cold p50", "cold p99"},
                {plain(field(requests, "total")), plain(field(requests, "failed")),
                 plain(field(requests, "in_flight")), at("warm", "p50"), at("warm", "p99"),
                 at("cold", "p50"), at("cold", "p99")}});
}

std::string seconds(json const& value) {
  return value.is_number() ? fmt::format("{:.2f} s", value.get<double>()) : plain(value);
}

/// Whose computations outlasted a pause.
std::string cut_short_text(json const& pauses) {
  auto const& models = field(pauses, "cut_short_models");
  if (!models.is_array() || models.empty()) {
    return {};
  }
  std::string names;
  for (auto const& each : models) {
    names += (names.empty() ? "" : ", ") + plain(each);
  }
  return "  cut short while computing: " + names + "\n";
}

std::string pauses_text(json const& status) {
  auto const& pauses = field(status, "pauses");
  auto const& run_ahead = field(field(status, "pool"), "run_ahead_us");
  if (!pauses.is_object()) {
    return {};
  }
  return "compute pauses\n" +
         table({{"count", "held", "of the last second", "min share", "cut short", "withheld",
                 "run-ahead"},
                {plain(field(pauses, "count")), seconds(field(pauses, "held_s")),
                 percent(field(pauses, "held_share")), percent(field(pauses, "min_share")),
                 plain(field(pauses, "cut_short")), seconds(field(pauses, "withheld_s")),
                 run_ahead.is_number() ? fmt::format("{:.0f} us", run_ahead.get<double>())
                                       : plain(run_ahead)}}) +
         cut_short_text(pauses);
}

/// Behind the reason why a promise cannot be kept.
std::string what_would_do(json const& model) {
  auto const& would_do = field(model, "would_do");
  std::string text;
  if (auto const& rate = field(would_do, "rate_per_s"); rate.is_number() && rate > 0.0) {
    text += fmt::format("; at most {:.3g} requests/s would do", rate.get<double>());
  }
  if (auto const& latency = field(would_do, "latency_ms"); latency.is_number()) {
    text += fmt::format("; a latency of {:.0f} ms would do", std::ceil(latency.get<double>()));
  }
  return text;
}

std::string models_text(json const& models) {
  if (!models.is_array() || models.empty()) {
    return {};
  }
  std::vector<row> rows{{"name", "state", "bytes", "activations", "idle timeout", "required",
                         "predicted", "observed", "requests", "cold starts", "prewarms",
                         "arrivals/s"}};
  std::string warnings;
  for (auto const& model : models) {
    auto cell = [&model](char const* name) { return plain(field(model, name)); };
    rows.push_back({cell("name"), cell("state"), bytes(field(model, "bytes")),
                    bytes(field(model, "activation_bytes")), idle_timeout(model),
                    percent(field(model, "required_attainment")),
                    percent(field(model, "predicted_attainment")),
                    percent(field(model, "observed_attainment")), cell("requests"),
                    cell("cold_starts"), cell("prewarms"), cell("arrival_rate_per_s")});
    if (field(model, "infeasible") == json(true)) {
      warnings += fmt::format("  {} is predicted to miss its promise with any idle timeout: {}{}\n",
                              cell("name"), cell("reason"), what_would_do(model));
    }
    if (field(model, "unservable").is_string()) {
      warnings += fmt::format("  {} cannot be served: {}\n", cell("name"), cell("unservable"));
    }
  }
  return "models\n" + table(rows) + warnings;
}

/// Inference servers that requests are relayed to.
std::string relays_text(json const& engines) {
  if (!engines.is_array() || engines.empty()) {
    return {};
  }
  std::vector<row> rows{{"name", "state", "pid", "address", "in flight", "waiting", "answered",
                         "refused", "failed", "client left", "starts", "observed", "kv", "kv bytes",
                         "in use"}};
  std::string reasons;
  for (auto const& engine : engines) {
    auto cell = [&engine](char const* name) { return plain(field(engine, name)); };
    rows.push_back({cell("name"), cell("state"), cell("pid"), cell("address"), cell("in_flight"),
                    cell("waiting"), cell("answered"), cell("refused"), cell("failed"),
                    cell("client_left"), cell("starts"),
                    percent(field(engine, "observed_attainment")), cell("kv"),
                    bytes(field(engine, "kv_bytes")), bytes(field(engine, "kv_used_bytes"))});
    if (auto const& fault = field(engine, "why_kv_fixed"); fault.is_string() && fault != json("")) {
      reasons += fmt::format("  {}: {}\n", cell("name"), plain(fault));
    }
    if (auto const& reason = field(engine, "reason"); reason.is_string() && reason != json("")) {
      reasons += fmt::format("  {}: {}\n", cell("name"), plain(reason));
    }
  }
  return "relayed to\n" + table(rows) + reasons;
}

std::string unservable_text(json const& list) {
  std::string text;
  if (list.is_array()) {
    for (auto const& each : list) {
      text += fmt::format("  {}: {}\n", plain(field(each, "name")), plain(field(each, "reason")));
    }
  }
  return text.empty() ? text : "cannot be served\n" + text;
}

std::string handovers_text(json const& handovers) {
  auto const& latency = field(handovers, "latency_us");
  auto at = [&latency](char const* name) { return milliseconds_of_us(field(latency, name)); };
  return "handovers\n" +
         table({{"count", "to serving", "to training", "to engines", "p50", "p90", "p99", "max"},
                {plain(field(handovers, "count")), bytes(field(handovers, "bytes_to_serving")),
                 bytes(field(handovers, "bytes_to_training")),
                 bytes(field(handovers, "bytes_to_engines")), at("p50"), at("p90"), at("p99"),
                 at("max")}});
}

std::string one_pool_text(json const& status) {
  return owners_text(field(status, "pool")) + clients_text(field(status, "clients")) +
         holdings_text(field(status, "clients")) + detail::standing_text(field(status, "clients")) +
         detail::parking_text(field(status, "clients")) + unparkable_text(status) +
         long_units_text(field(status, "clients")) + handovers_text(field(status, "handovers")) +
         server_text(status) + pauses_text(status) + models_text(field(status, "models")) +
         relays_text(field(status, "engines")) + unservable_text(field(status, "unservable"));
}

}  // namespace

std::string status_text(json const& status) {
  std::string text;
  for (auto const& pool : detail::several(status)) {
    text += (text.empty() ? "" : "\n") + one_pool_text(pool);
  }
  return text;
}

}  // namespace sluice::cli
