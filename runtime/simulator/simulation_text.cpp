#include "runtime/simulator/simulation_text.hpp"

#include <fmt/format.h>

#include <optional>

#include "runtime/simulator/cells.hpp"

namespace sluice::simulator {
namespace {

constexpr double per_cent = 100.0;
constexpr double ms = 1000.0;
constexpr double hour_s = 3600.0;

double ratio(double part, std::uint64_t whole) {
  return whole > 0 ? part / static_cast<double>(whole) : 0.0;
}

/// What the policy itself predicted while it ran, else the formula's.
std::optional<double> predicted_share(model_outcome const& seen, forecast const& before) {
  return seen.predictions > 0 ? std::optional{ratio(seen.predicted, seen.predictions)}
                              : before.in_time;
}

std::string number_or_dash(std::optional<double> value, double scale) {
  return value ? fmt::format("{:.2f}", *value * scale) : "-";
}

std::vector<std::string> cells_of(simulation_row const& row) {
  auto const& seen = row.outcome;
  auto const all = seen.all();
  return {row.policy,
          fmt::format("{:.2f}", per_cent * seen.in_time()),
          number_or_dash(predicted_share(all, row.before), per_cent),
          fmt::format("{:.1f}", ms * seen.responses.quantile(0.5)),
          fmt::format("{:.1f}", ms * seen.responses.quantile(0.99)),
          fmt::format("{:.2f}", ms * ratio(all.waits_s, all.answered)),
          number_or_dash(row.before.mean_wait_s, ms),
          fmt::format("{:.2f}", per_cent * ratio(static_cast<double>(all.cold), all.requests)),
          fmt::format("{:.2f}", per_cent * seen.released_share()),
          fmt::format("{:.1f}", seen.length_s > 0.0
                                    ? hour_s * static_cast<double>(all.loads) / seen.length_s
                                    : 0.0),
          fmt::format("{:.2f}", per_cent * ratio(static_cast<double>(all.refused), all.requests)),
          all.predictions > 0      ? "scheduler"
          : !row.before.by.empty() ? row.before.by
                                   : "-"};
}

void add_line(std::string& to, simulation_row const& row, std::string const& model,
              model_outcome const& seen, double released_share,
              std::optional<double> predicted_wait_s) {
  auto const optional_number = [](std::optional<double> value) {
    return value ? fmt::format("{:.9g}", *value) : std::string{};
  };
  to += fmt::format("{},{},{},{},{},{},{},{:.9g},{},{:.9g},{:.9g},{},{:.9g},{}\n",
                    csv_cell(row.policy), csv_cell(model), seen.requests, seen.refused, seen.within,
                    seen.cold, seen.loads, ratio(static_cast<double>(seen.within), seen.requests),
                    optional_number(predicted_share(seen, row.before)),
                    ratio(seen.waits_s, seen.answered), ratio(seen.responses_s, seen.answered),
                    optional_number(predicted_wait_s), released_share, csv_cell(row.before.by));
}

}  // namespace

std::string table_of(std::vector<simulation_row> const& rows) {
  std::vector<std::vector<std::string>> lines{{"policy", "in time %", "predicted %", "p50 ms",
                                               "p99 ms", "wait ms", "predicted ms", "cold %",
                                               "released %", "loads/h", "refused %", "by"}};
  for (auto const& row : rows) {
    lines.push_back(cells_of(row));
  }
  return aligned(lines, {0, lines.front().size() - 1});
}

std::string csv_of(std::vector<simulation_row> const& rows,
                   std::vector<std::string> const& models) {
  std::string text =
      "policy,model,requests,refused,within,cold,loads,in_time,predicted_in_time,mean_wait_s,"
      "mean_response_s,predicted_wait_s,released_share,predicted_by\n";
  for (auto const& row : rows) {
    auto const& seen = row.outcome;
    add_line(text, row, "all", seen.all(), seen.released_share(), row.before.mean_wait_s);
    for (std::size_t i = 0; i < seen.models.size(); ++i) {
      double const share = seen.length_s > 0.0 ? seen.models[i].released_s / seen.length_s : 0.0;
      // A formula's means are of all requests together.
      simulation_row const own{row.policy, {}, {}};
      add_line(text, own, models[i], seen.models[i], share, std::nullopt);
    }
  }
  return text;
}

}  // namespace sluice::simulator
