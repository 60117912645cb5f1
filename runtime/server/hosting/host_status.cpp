#include "runtime/server/hosting/host_status.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace sluice::server {
namespace {

using nlohmann::json;

double in_seconds(std::chrono::duration<double> value) {
  return value.count();
}
double in_ms(std::chrono::duration<double, std::milli> value) {
  return value.count();
}
double in_us(std::chrono::duration<double, std::micro> value) {
  return value.count();
}

/// Infinities, which JSON does not have, become null.
json describe(model_snapshot const& model) {
  auto const& decision = model.report.warm;
  auto const& kept = model.together ? *model.together : decision.chosen;
  auto const never = std::numeric_limits<double>::infinity();
  json result{
      {"name", model.name},
      {"version", model.version},
      {"state", to_string(model.state)},
      {"bytes", model.bytes},
      {"idle_timeout_s", model.always_warm ? never : in_seconds(kept.idle_timeout)},
      {"chosen_together", model.together.has_value()},
      {"predicted_attainment", kept.attainment},
      {"required_attainment", decision.required_share},
      {"observed_attainment", nullptr},
      {"observed_requests", model.report.observed_requests},
      {"released_fraction", kept.released_fraction},
      {"slo",
       {{"percentile", model.goal.percentile},
        {"latency_ms", in_ms(model.goal.latency)},
        {"attainment", model.goal.attainment},
        {"window_s", in_seconds(model.goal.window)}}},
      {"infeasible", !decision.feasible()},
      {"reason", to_string(decision.reason)},
      {"would_do", nullptr},
      {"predicted_by", to_string(decision.by)},
      {"predicted_uncorrected", kept.uncorrected},
      {"predicted_half_width", model.report.half_width},
      {"correction_log_odds", decision.log_odds},
      {"admitted_share", decision.admit_share},
      {"requests", model.requests},
      {"failed", model.failed},
      {"cancelled", model.cancelled},
      {"refused", model.report.refused},
      {"cold_starts", model.cold_starts},
      {"prewarms", model.prewarms},
      {"prewarms_used", model.prewarms_used},
      {"prewarms_omitted", model.prewarms_omitted},
      {"outlives_server", model.outlives_server},
      {"image_bytes", model.image_bytes},
      {"file_read_bytes", model.read_bytes},
      {"activation_bytes", model.activation_bytes},
      {"arrival_rate_per_s", model.report.fast_rate_per_s},
      {"service_ms", in_ms(decision.service_mean)},
      {"load_ms", in_ms(decision.load_mean)},
      {"queue", model.queue},
  };
  if (model.report.observed_attainment) {
    result["observed_attainment"] = *model.report.observed_attainment;
  }
  if (decision.would_do) {
    result["would_do"] = {{"rate_per_s", decision.would_do->rate_per_s},
                          {"latency_ms", in_ms(decision.would_do->latency)}};
  }
  return result;
}

json describe(latency_window::quantiles const& latency) {
  return {{"n", latency.n}, {"p50", in_ms(latency.p50)}, {"p99", in_ms(latency.p99)}};
}

json describe(host_snapshot::handover const& handover) {
  auto const& report = handover.report;
  auto const at = std::chrono::duration<double>(handover.at.time_since_epoch());
  return {{"model", handover.model},
          {"at_unix_s", at.count()},
          {"bytes", report.bytes},
          {"bytes_reclaimed", report.bytes_reclaimed},
          {"notify_us", in_us(report.notify)},
          {"gate_us", in_us(report.gate)},
          {"drain_us", in_us(report.drain)},
          {"revoke_us", in_us(report.revoke)},
          {"ledger_us", in_us(report.ledger)},
          {"map_us", in_us(report.map)},
          {"total_us", in_us(report.total)},
          {"load_us", in_us(handover.load)}};
}

json describe(pause_counts const& pauses) {
  auto const share = pauses.window.count() == 0
                         ? 0.0
                         : in_seconds(pauses.held_in_window) / in_seconds(pauses.window);
  return {{"count", pauses.pauses},
          {"announced", pauses.announced},
          {"held_s", in_seconds(pauses.held)},
          {"held_share", share},
          {"min_share", pauses.min_share},
          {"cut_short", pauses.cut_short},
          {"withheld_s", in_seconds(pauses.withheld)},
          {"busy_s", in_seconds(pauses.busy)}};
}

template <typename Range>
json list_of(Range const& range) {
  json result = json::array();
  for (auto const& each : range) {
    result.push_back(describe(each));
  }
  return result;
}

}  // namespace

std::string remedy_text(scheduler::warm_decision const& decision) {
  auto const& would_do = decision.would_do;
  bool const has_rate = would_do && would_do->rate_per_s > 0.0;
  bool const has_latency = would_do && would_do->latency < scheduler::forever;
  std::string text;
  if (has_rate) {
    text = fmt::format("at most {:.3g} requests/s", would_do->rate_per_s);
  }
  if (has_latency) {
    text += fmt::format("{}a latency of {:.0f} ms", text.empty() ? "" : ", or ",
                        std::ceil(in_ms(would_do->latency)));
  }
  return text.empty() ? "no other rate or latency" : text;
}

json describe(host_snapshot const& now) {
  auto pauses = describe(now.pauses);
  pauses["cut_short_models"] = now.cut_short_models;
  return {
      {"models", list_of(now.models)},
      {"requests", {{"total", now.requests}, {"failed", now.failed}, {"in_flight", now.in_flight}}},
      {"latency_ms", {{"warm", describe(now.warm)}, {"cold", describe(now.cold)}}},
      {"pauses", std::move(pauses)},
      {"handovers", list_of(now.handovers)}};
}

}  // namespace sluice::server
