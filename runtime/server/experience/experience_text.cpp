#include "runtime/server/experience/experience_text.hpp"

#include <fmt/format.h>

#include <boost/crc.hpp>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/numbers.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;
using scheduler::seconds;

constexpr std::string_view form = "sluice-experience";
constexpr unsigned version = 2;
constexpr char const* without_end = "forever";

error damaged(std::string const& what) {
  return {error_kind::invalid_argument, what};
}

std::string checksum_of(std::string_view text) {
  boost::crc_32_type sum;
  sum.process_bytes(text.data(), text.size());
  return fmt::format("{:08x}", sum.checksum());
}

std::uint64_t whole_in(json const& from) {
  if (!from.is_number_unsigned()) {
    throw damaged("a count is no whole number");
  }
  return from.get<std::uint64_t>();
}

json of_rate(scheduler::decayed_rate::kept_state const& from) {
  return {{"events", from.events}, {"watched", from.watched}};
}

scheduler::decayed_rate::kept_state rate_in(json const& from) {
  return {from.at("events"), from.at("watched")};
}

json of_gaps(scheduler::gap_histogram::kept_state const& from) {
  auto list = json::array();
  for (auto const& each : from) {
    list.push_back({each.bin, each.weight, each.total_s});
  }
  return list;
}

scheduler::gap_histogram::kept_state gaps_in(json const& from) {
  scheduler::gap_histogram::kept_state result;
  for (auto const& each : from) {
    result.push_back({whole_in(each.at(0)), each.at(1), each.at(2)});
  }
  return result;
}

json of_dispersion(scheduler::dispersion_index::kept_state const& from) {
  return {from.closed, from.weight, from.sum, from.square_sum};
}

scheduler::dispersion_index::kept_state dispersion_in(json const& from) {
  return {from.at(0), from.at(1), from.at(2), from.at(3)};
}

json of_bunches(scheduler::period_estimator::kept_bunches const& from) {
  return {{"begins_s", from.begins},
          {"number", from.number},
          {"in_last", from.in_last},
          {"requests", from.requests},
          {"span_s", from.span_s},
          {"longest_quiet_s", from.longest_quiet_s},
          {"longest_before_s", from.longest_before_s}};
}

scheduler::period_estimator::kept_bunches bunches_in(json const& from) {
  return {.begins = from.at("begins_s"),
          .number = whole_in(from.at("number")),
          .in_last = from.at("in_last"),
          .requests = from.at("requests"),
          .span_s = from.at("span_s"),
          .longest_quiet_s = from.at("longest_quiet_s"),
          .longest_before_s = from.at("longest_before_s")};
}

json of_periods(scheduler::period_estimator::kept_state const& from) {
  auto by_silence = json::array();
  for (auto const& each : from.by_silence) {
    by_silence.push_back(of_bunches(each));
  }
  json found;
  if (from.found) {
    auto const& is = *from.found;
    found = {{"silence", is.silence}, {"period_s", is.period_s}, {"margin_s", is.margin_s},
             {"next_s", is.next_s},   {"bunches", is.bunches},   {"unexpected", is.unexpected},
             {"periods", is.periods}, {"left_out", is.left_out}};
  }
  return {{"now_s", from.now_s},
          {"last_s", from.last_s},
          {"by_silence", std::move(by_silence)},
          {"found", std::move(found)}};
}

scheduler::period_estimator::kept_state periods_in(json const& from) {
  scheduler::period_estimator::kept_state result{.now_s = from.at("now_s"),
                                                 .last_s = from.at("last_s")};
  for (auto const& each : from.at("by_silence")) {
    result.by_silence.push_back(bunches_in(each));
  }
  if (auto const& is = from.at("found"); !is.is_null()) {
    result.found = {.silence = whole_in(is.at("silence")),
                    .period_s = is.at("period_s"),
                    .margin_s = is.at("margin_s"),
                    .next_s = is.at("next_s"),
                    .bunches = is.at("bunches"),
                    .unexpected = is.at("unexpected"),
                    .periods = is.at("periods"),
                    .left_out = is.at("left_out")};
  }
  return result;
}

json of_attained(scheduler::attainment_window::kept_state const& from) {
  auto seen = json::array();
  for (auto const& each : from.seen) {
    seen.push_back({each.requests, each.within});
  }
  return {{"slice_s", from.slice_s}, {"into_s", from.into_s}, {"seen", seen}};
}

scheduler::attainment_window::kept_state attained_in(json const& from) {
  scheduler::attainment_window::kept_state result{from.at("slice_s"), from.at("into_s"), {}};
  for (auto const& each : from.at("seen")) {
    result.seen.push_back({whole_in(each.at(0)), whole_in(each.at(1))});
  }
  return result;
}

json of_corrections(scheduler::calibration::kept_state const& from) {
  return {{"requests", from.requests},
          {"over", from.over},
          {"chance", from.chance},
          {"clusters", from.clusters},
          {"batch_s", from.batch_s},
          {"batch_over", from.batch_over},
          {"fitted", from.fitted},
          {"information", from.information},
          {"is_correcting", from.is_correcting}};
}

scheduler::calibration::kept_state corrections_in(json const& from) {
  return {.requests = from.at("requests"),
          .over = from.at("over"),
          .chance = from.at("chance"),
          .clusters = from.at("clusters"),
          .batch_s = from.at("batch_s"),
          .batch_over = from.at("batch_over"),
          .fitted = from.at("fitted"),
          .information = from.at("information"),
          .is_correcting = from.at("is_correcting")};
}

/// JSON has no number for it.
json of_timeout(std::optional<seconds> const& from) {
  if (!from) {
    return nullptr;
  }
  return *from == scheduler::forever ? json(without_end) : json(from->count());
}

std::optional<seconds> timeout_in(json const& from) {
  if (from.is_null()) {
    return std::nullopt;
  }
  return from == without_end ? scheduler::forever : seconds{from.get<double>()};
}

json of_learnt(scheduler::experience const& from) {
  auto dispersions = json::array();
  for (auto const& each : from.dispersions) {
    dispersions.push_back(of_dispersion(each));
  }
  return {{"latency_s", from.latency.count()},
          {"window_s", from.window.count()},
          {"fast_rate", of_rate(from.rates.fast)},
          {"slow_rate", of_rate(from.rates.slow)},
          {"gaps", of_gaps(from.gaps)},
          {"dispersions", dispersions},
          {"periods", of_periods(from.periods)},
          {"services_s", from.services},
          {"loads_s", from.loads},
          {"handover_s", from.handover.count()},
          {"handovers", from.handovers},
          {"attained", of_attained(from.attained)},
          {"corrections", of_corrections(from.corrections)},
          {"idle_timeout_s", of_timeout(from.idle_timeout)}};
}

scheduler::experience learnt_in(json const& from) {
  scheduler::experience result{
      .latency = seconds{from.at("latency_s").get<double>()},
      .window = seconds{from.at("window_s").get<double>()},
      .rates = {rate_in(from.at("fast_rate")), rate_in(from.at("slow_rate"))},
      .gaps = gaps_in(from.at("gaps")),
      .periods = periods_in(from.at("periods")),
      .services = from.at("services_s"),
      .loads = from.at("loads_s"),
      .handover = seconds{from.at("handover_s").get<double>()},
      .handovers = from.at("handovers"),
      .attained = attained_in(from.at("attained")),
      .corrections = corrections_in(from.at("corrections")),
      .idle_timeout = timeout_in(from.at("idle_timeout_s"))};
  for (std::size_t i = 0; i < result.dispersions.size(); ++i) {
    result.dispersions.at(i) = dispersion_in(from.at("dispersions").at(i));
  }
  return result;
}

/// The word before the next blank, which is taken off.
std::string_view next_word(std::string_view& line) {
  auto const end = std::min(line.find(' '), line.size());
  auto const word = line.substr(0, end);
  line.remove_prefix(std::min(end + 1, line.size()));
  return word;
}

std::string_view content_of(std::string_view text) {
  auto const end = text.find('\n');
  auto line = text.substr(0, std::min(end, text.size()));
  if (end == std::string_view::npos || next_word(line) != form) {
    throw damaged(fmt::format("it does not begin as one of '{}'", form));
  }
  auto const written = parse_number<unsigned>(next_word(line));
  if (written != version) {
    throw damaged(written ? fmt::format("it is of version {}, and this server reads version {}",
                                        *written, version)
                          : "it does not say its version");
  }
  bool const has_sum = next_word(line) == "crc32";
  auto const sum = next_word(line);
  bool const has_length = next_word(line) == "bytes";
  auto const length = parse_number<std::size_t>(next_word(line));
  auto const content = text.substr(end + 1);
  if (!has_sum || !has_length || !length || !line.empty()) {
    throw damaged("its first line is damaged");
  }
  if (*length != content.size()) {
    throw damaged(fmt::format("it has {} bytes of {}", content.size(), *length));
  }
  if (auto const found = checksum_of(content); found != sum) {
    throw damaged(fmt::format("its checksum is {}, and should be {}", found, sum));
  }
  return content;
}

}  // namespace

std::string text_of(experiences const& all) {
  auto models = json::array();
  for (auto const& each : all.models) {
    models.push_back({{"model", each.model},
                      {"stands_for", each.stands_for},
                      {"learnt", of_learnt(each.learnt)}});
  }
  std::chrono::duration<double> const since_epoch = all.saved_at.time_since_epoch();
  auto const content =
      json{{"saved_at_s", since_epoch.count()}, {"models", std::move(models)}}.dump(
          -1, ' ', false, json::error_handler_t::replace);
  return fmt::format("{} {} crc32 {} bytes {}\n{}", form, version, checksum_of(content),
                     content.size(), content);
}

experiences read_experiences(std::string_view text) {
  auto const content = content_of(text);
  constexpr double last_s = 9e9;  // a clock that says more has no time point
  try {
    auto const given = json::parse(content);
    double const saved_s = given.at("saved_at_s");
    if (!(std::abs(saved_s) < last_s)) {
      throw damaged("it says no time at which it was written");
    }
    std::chrono::duration<double> const since_epoch{saved_s};
    experiences result;
    result.saved_at = std::chrono::system_clock::time_point{
        std::chrono::duration_cast<std::chrono::system_clock::duration>(since_epoch)};
    for (auto const& each : given.at("models")) {
      result.models.push_back(
          {each.at("model"), each.at("stands_for"), learnt_in(each.at("learnt"))});
    }
    return result;
  } catch (json::exception const& wrong) {
    throw damaged(fmt::format("its content is not understood: {}", wrong.what()));
  }
}

}  // namespace sluice::server
