#include "runtime/simulator/placing_text.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/simulator/cells.hpp"

namespace sluice::simulator {
namespace {

constexpr std::size_t most_shown = 8;
constexpr double percents = 100.0;

std::string gib(std::uint64_t bytes) {
  constexpr double one = 1024.0 * 1024.0 * 1024.0;
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / one);
}

std::vector<std::vector<std::size_t>> models_on(placed_models const& those) {
  std::vector<std::vector<std::size_t>> result(those.devices.size());
  for (std::size_t m = 0; m < those.models.size(); ++m) {
    for (auto const device : those.found.devices_of[m]) {
      result[device].push_back(m);
    }
  }
  return result;
}

std::string some_names(std::vector<std::string> const& names, std::vector<std::size_t> const& of) {
  std::string text;
  for (std::size_t i = 0; i < std::min(of.size(), most_shown); ++i) {
    text += (i == 0 ? "" : ", ") + names[of[i]];
  }
  return of.size() > most_shown ? fmt::format("{} and {} more", text, of.size() - most_shown)
                                : text;
}

}  // namespace

std::string why_left_out(placed_models const& those,
                         scheduler::model_placement::left_out_model const& which) {
  auto const needs = gib(those.models[which.model].bytes);
  switch (which.why) {
    case scheduler::model_placement::reason::too_large:
      return fmt::format("needs {}, and the largest device ({}) has {}", needs, which.device,
                         gib(which.most_bytes));
    case scheduler::model_placement::reason::no_room:
      return fmt::format("needs {}, and of no device is more free than {} (of {})", needs,
                         gib(which.most_bytes), which.device);
    case scheduler::model_placement::reason::no_gain:
      break;
  }
  return fmt::format(
      "has room on device {}, and is asked for {:.4g} times a second: wherever it "
      "were, others would lose as many answers in time as it gained",
      which.device, those.models[which.model].arrivals_per_s);
}

std::string table_of(placed_models const& those) {
  std::vector<std::vector<std::string>> lines{
      {"device", "models", "weights", "memory", "busy %", "predicted %", "which"}};
  auto const there = models_on(those);
  for (std::size_t d = 0; d < there.size(); ++d) {
    auto const& seen = those.predicted.devices[d];
    lines.push_back({std::to_string(d), std::to_string(there[d].size()), gib(seen.bytes),
                     gib(those.devices[d].bytes),
                     fmt::format("{:.1f}", percents * seen.utilisation),
                     there[d].empty() ? "-" : fmt::format("{:.2f}", percents * seen.share_within),
                     there[d].empty() ? "-" : some_names(those.names, there[d])});
  }
  auto text = aligned(lines, {lines.front().size() - 1});
  auto const& out = those.found.left_out;
  for (std::size_t i = 0; i < std::min(out.size(), most_shown); ++i) {
    text += fmt::format("on no device: {} {}\n", those.names[out[i].model],
                        why_left_out(those, out[i]));
  }
  if (out.size() > most_shown) {
    text += fmt::format("on no device: {} more\n", out.size() - most_shown);
  }
  return text;
}

std::string csv_of(placed_models const& those) {
  std::string text = "model,device,bytes,arrivals_per_s,predicted_in_time,left_out\n";
  for (std::size_t m = 0; m < those.models.size(); ++m) {
    auto const& its = those.found.devices_of[m];
    auto const name = csv_cell(those.names[m]);
    for (auto const device : its) {
      text += fmt::format("{},{},{},{:.9g},{:.9g},\n", name, device, those.models[m].bytes,
                          those.models[m].arrivals_per_s / static_cast<double>(its.size()),
                          those.predicted.share_within_of[m]);
    }
    if (its.empty()) {
      auto const why = std::find_if(those.found.left_out.begin(), those.found.left_out.end(),
                                    [m](auto const& each) { return each.model == m; });
      text += fmt::format(
          "{},,{},{:.9g},0,{}\n", name, those.models[m].bytes, those.models[m].arrivals_per_s,
          why == those.found.left_out.end() ? "" : csv_cell(why_left_out(those, *why)));
    }
  }
  return text;
}

}  // namespace sluice::simulator
