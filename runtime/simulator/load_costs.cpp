#include "runtime/simulator/load_costs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "memhandover/base/error.hpp"

namespace sluice::simulator {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(std::string const& file, std::string const& why) {
  throw error{error_kind::invalid_argument, fmt::format("record {}: {}", file, why)};
}

json record_of(std::string const& file) {
  std::ifstream from{file};
  if (!from) {
    throw error{error_kind::not_found,
                fmt::format("there is no record {}; --records names a folder of records and "
                            "--machine whose they are",
                            file)};
  }
  auto record = json::parse(from, nullptr, false);
  if (!record.is_object() || !record.contains("cells") || !record["cells"].is_array()) {
    refuse(file, "is no record: it has no cells");
  }
  return record;
}

/// A metric's field, of the first cell that `is_it`.
double number_in(json const& record, std::string const& file, char const* metric, char const* field,
                 std::function<bool(json const&)> const& is_it) {
  for (auto const& cell : record["cells"]) {
    auto const pointer = json::json_pointer{fmt::format("/metrics/{}/{}", metric, field)};
    if (cell.contains(pointer) && cell[pointer].is_number() && is_it(cell)) {
      double const value = cell[pointer].get<double>();
      if (!(value >= 0.0) || !std::isfinite(value)) {
        refuse(file, fmt::format("{}.{} is {}", metric, field, value));
      }
      return value;
    }
  }
  refuse(file, fmt::format("no cell has {}.{}", metric, field));
}

}  // namespace

measured_time::measured_time(double p50_s, double p90_s, double p99_s, double max_s)
    : at_{{{0.5, p50_s}, {0.9, p90_s}, {0.99, p99_s}, {1.0, max_s}}}, points_(4) {
  if (!std::is_sorted(at_.begin(), at_.end(),
                      [](auto const& a, auto const& b) { return a.seconds < b.seconds; })) {
    throw error{
        error_kind::invalid_argument,
        fmt::format("quantiles must rise; got {}, {}, {} and {} s", p50_s, p90_s, p99_s, max_s)};
  }
}

double measured_time::draw(draws& random) const {
  if (points_ == 1) {
    return at_.front().seconds;
  }
  double const share = random.uniform();
  point before{0.0, 0.0};
  for (auto const& each : at_) {
    if (share <= each.share) {
      return before.seconds +
             (each.seconds - before.seconds) * (share - before.share) / (each.share - before.share);
    }
    before = each;
  }
  return at_.back().seconds;
}

double measured_time::mean() const {
  if (points_ == 1) {
    return at_.front().seconds;
  }
  double sum = 0.0;
  point before{0.0, 0.0};
  for (auto const& each : at_) {
    sum += (each.share - before.share) * 0.5 * (each.seconds + before.seconds);
    before = each;
  }
  return sum;
}

double load_costs::mean_s(std::uint64_t bytes) const {
  return handover.mean() + fixed_s + static_cast<double>(bytes) / bytes_per_s;
}

load_costs costs_of_records(std::string const& folder, std::string const& machine) {
  constexpr double us = 1e-6;
  load_costs costs;
  auto const handover_file = fmt::format("{}/handover-{}.json", folder, machine);
  auto const handover = record_of(handover_file);
  auto const any = [](json const&) { return true; };
  auto const quantile = [&](char const* field) {
    return us * number_in(handover, handover_file, "latency_us", field, any);
  };
  costs.handover =
      measured_time{quantile("p50"), quantile("p90"), quantile("p99"), quantile("max")};
  auto const copies_file = fmt::format("{}/parking-{}.json", folder, machine);
  costs.bytes_per_s = number_in(record_of(copies_file), copies_file, "moved_bytes_per_s", "value",
                                [](json const& cell) {
                                  auto const part = json::json_pointer{"/params/part"};
                                  return cell.contains(part) && cell[part] == "copy in";
                                });
  if (costs.bytes_per_s <= 0.0) {
    refuse(copies_file, "its copies have no rate");
  }
  return costs;
}

}  // namespace sluice::simulator
