#include "runtime/simulator/trace_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/base/numbers.hpp"
#include "runtime/simulator/draws.hpp"
#include "runtime/simulator/model_shares.hpp"

namespace sluice::simulator {
namespace {

constexpr double longest_s = 100.0 * 366.0 * 86400.0;

/// Where in a file something is said.
struct trace_line {
  std::string const* file;
  std::size_t line = 0;

  [[noreturn]] void refuse(std::string const& why) const {
    throw error{error_kind::invalid_argument, fmt::format("{}:{}: {}", *file, line, why)};
  }
};

double number_of(std::string_view text, char const* what, trace_line const& at) {
  auto const value = parse_number<double>(text);
  if (!value || !std::isfinite(*value)) {
    at.refuse(fmt::format("{} is '{}', must be a number such as 12.5", what, text));
  }
  if (*value < 0.0 || *value > longest_s * 1000.0) {
    at.refuse(fmt::format("{} is {}, must be 0 or more and less than {:g}", what, text,
                          longest_s * 1000.0));
  }
  return *value;
}

std::vector<std::string_view> split(std::string_view line) {
  std::vector<std::string_view> fields;
  for (;;) {
    auto const comma = line.find(',');
    fields.push_back(line.substr(0, comma));
    if (comma == std::string_view::npos) {
      return fields;
    }
    line.remove_prefix(comma + 1);
  }
}

/// Seconds since 1970 of a date such as `2023-11-16 18:17:03.9799600`.
double seconds_of_date(std::string_view text, trace_line const& at) {
  auto const wrong = [&]() {
    at.refuse(
        fmt::format("TIMESTAMP is '{}', must be a date such as 2023-11-16 18:17:03.9799600", text));
  };
  constexpr std::string_view form = "dddd-dd-dd dd:dd:dd";
  if (text.size() < form.size()) {
    wrong();
  }
  for (std::size_t i = 0; i < form.size(); ++i) {
    bool const is_digit = text[i] >= '0' && text[i] <= '9';
    if (form[i] == 'd' ? !is_digit : text[i] != form[i]) {
      wrong();
    }
  }
  auto const part = [&](std::size_t from, std::size_t length) {
    unsigned value = 0;
    std::from_chars(text.data() + from, text.data() + from + length, value);
    return value;
  };
  std::chrono::year_month_day const day{std::chrono::year{static_cast<int>(part(0, 4))},
                                        std::chrono::month{part(5, 2)},
                                        std::chrono::day{part(8, 2)}};
  auto const [hour, minute, second] = std::array{part(11, 2), part(14, 2), part(17, 2)};
  auto const rest = text.substr(form.size());
  if (!day.ok() || hour > 23 || minute > 59 || second > 60 ||
      (!rest.empty() && (rest.front() != '.' || rest.size() == 1 ||
                         rest.find_first_not_of("0123456789", 1) != std::string_view::npos))) {
    wrong();
  }
  double const fraction = rest.empty() ? 0.0 : number_of(fmt::format("0{}", rest), "TIMESTAMP", at);
  auto const days = std::chrono::sys_days{day}.time_since_epoch().count();
  return static_cast<double>(days) * 86400.0 + 3600.0 * hour + 60.0 * minute + second + fraction;
}

struct line_read {
  double at_s = 0.0;
  std::optional<std::string> model{};
  std::optional<double> service_s{};
  double context_tokens = 0.0;
  double generated_tokens = 0.0;
};

/// One format: a line in, what it says out.
class line_format {
 public:
  line_format() = default;
  line_format(line_format const&) = delete;
  line_format& operator=(line_format const&) = delete;
  virtual ~line_format() = default;
  [[nodiscard]] virtual line_read read(std::string_view line, trace_line const& at) const = 0;
  /// Whether lines are in the order of arrivals, so that a time that goes back is a fault.
  [[nodiscard]] virtual bool is_in_order() const { return true; }
};

/// Formats whose first line names the columns.
class column_format : public line_format {
 public:
  explicit column_format(std::size_t columns) : columns_(columns) {}

 protected:
  [[nodiscard]] std::vector<std::string_view> fields(std::string_view line,
                                                     trace_line const& at) const {
    auto found = split(line);
    if (found.size() != columns_) {
      at.refuse(fmt::format("has {} columns, the first line has {}", found.size(), columns_));
    }
    return found;
  }

 private:
  std::size_t columns_;
};

class azure_llm_format final : public column_format {
 public:
  azure_llm_format() : column_format(3) {}
  [[nodiscard]] line_read read(std::string_view line, trace_line const& at) const override {
    auto const found = fields(line, at);
    return {.at_s = seconds_of_date(found[0], at),
            .context_tokens = number_of(found[1], "ContextTokens", at),
            .generated_tokens = number_of(found[2], "GeneratedTokens", at)};
  }
};

class azure_functions_format final : public column_format {
 public:
  azure_functions_format() : column_format(4) {}
  [[nodiscard]] line_read read(std::string_view line, trace_line const& at) const override {
    auto const found = fields(line, at);
    double const duration = number_of(found[3], "duration", at);
    // It was asked for so long before it ended; what was running when the record began, before time 0.
    double const asked = number_of(found[2], "end_timestamp", at) - duration;
    return {
        .at_s = asked, .model = fmt::format("{}/{}", found[0], found[1]), .service_s = duration};
  }
  [[nodiscard]] bool is_in_order() const override { return false; }  // but of ends
};

class named_columns_format final : public column_format {
 public:
  named_columns_format(std::vector<std::string_view> const& names, trace_line const& at)
      : column_format(names.size()) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      auto* const is = names[i] == "time_s"      ? &time_
                       : names[i] == "model"     ? &model_
                       : names[i] == "service_s" ? &service_
                                                 : nullptr;
      if (is == nullptr) {
        at.refuse(fmt::format("column '{}' is not known; columns are time_s, model and service_s",
                              names[i]));
      }
      if (*is) {
        at.refuse(fmt::format("column '{}' is there twice", names[i]));
      }
      *is = i;
    }
    if (!time_) {
      at.refuse("there is no column time_s, the seconds since the beginning");
    }
  }
  [[nodiscard]] line_read read(std::string_view line, trace_line const& at) const override {
    auto const found = fields(line, at);
    line_read result{.at_s = number_of(found[*time_], "time_s", at)};
    if (model_) {
      result.model = found[*model_];
      if (result.model->empty()) {
        at.refuse("model is empty, must be a name");
      }
    }
    if (service_) {
      result.service_s = number_of(found[*service_], "service_s", at);
    }
    return result;
  }

 private:
  std::optional<std::size_t> time_, model_, service_;
};

class mooncake_format final : public line_format {
 public:
  [[nodiscard]] line_read read(std::string_view line, trace_line const& at) const override {
    auto const object = nlohmann::json::parse(line, nullptr, false);
    if (!object.is_object()) {
      at.refuse("is no JSON object");
    }
    auto const number = [&](char const* key) {
      auto const found = object.find(key);
      if (found == object.end() || !found->is_number()) {
        at.refuse(fmt::format("'{}' must be there, and a number", key));
      }
      return number_of(found->dump(), key, at);
    };
    return {.at_s = number("timestamp") / 1000.0,
            .context_tokens = number("input_length"),
            .generated_tokens = number("output_length")};
  }
};

/// `first` is a line of requests already where there are no names of columns.
std::unique_ptr<line_format> format_of(std::string_view first, trace_line const& at) {
  if (first.starts_with("{")) {
    return std::make_unique<mooncake_format>();
  }
  if (first == "TIMESTAMP,ContextTokens,GeneratedTokens") {
    return std::make_unique<azure_llm_format>();
  }
  if (first == "app,func,end_timestamp,duration") {
    return std::make_unique<azure_functions_format>();
  }
  return std::make_unique<named_columns_format>(split(first), at);
}

/// Makes requests of lines.
class requests_maker {
 public:
  explicit requests_maker(trace_reading const& how)
      : how_(how), random_(how.seed), shares_(how.models, how.zipf_exponent) {
    if (!(how.speed > 0.0) || !std::isfinite(how.speed)) {
      throw error{error_kind::invalid_argument,
                  fmt::format("the speed is {}, must be more than 0", how.speed)};
    }
  }

  void add(line_read const& said) {
    auto const model = said.model ? number_of_name(*said.model) : shares_.draw(random_);
    result_.requests.push_back({.at_s = said.at_s, .service_s = service_of(said), .model = model});
  }

  trace finish(std::string const& name) {
    auto& all = result_.requests;
    if (all.empty()) {
      throw error{error_kind::invalid_argument, fmt::format("{}: has no requests", name)};
    }
    std::stable_sort(all.begin(), all.end(),
                     [](auto const& a, auto const& b) { return a.at_s < b.at_s; });
    double const begin = all.front().at_s;
    for (auto& each : all) {
      each.at_s = (each.at_s - begin) / how_.speed;
    }
    result_.length_s = all.back().at_s;
    for (auto i = result_.models.size(); numbers_.empty() && i < how_.models; ++i) {
      result_.models.push_back(fmt::format("m{}", i));
    }
    return std::move(result_);
  }

 private:
  std::uint32_t number_of_name(std::string const& name) {
    auto const [at, is_new] =
        numbers_.try_emplace(name, static_cast<std::uint32_t>(result_.models.size()));
    if (is_new) {
      result_.models.push_back(name);
    }
    return at->second;
  }

  double service_of(line_read const& said) {
    double const of_tokens = how_.per_context_token_s * said.context_tokens +
                             how_.per_generated_token_s * said.generated_tokens;
    if (said.service_s) {
      return *said.service_s;
    }
    return of_tokens > 0.0 ? of_tokens : random_.gamma(how_.service_s, how_.service_scv);
  }

  trace_reading how_;
  draws random_;
  model_shares shares_;
  trace result_;
  std::map<std::string, std::uint32_t, std::less<>> numbers_;
};

}  // namespace

trace read_trace(std::istream& from, std::string const& name, trace_reading const& how) {
  requests_maker maker{how};
  std::unique_ptr<line_format> format;
  trace_line at{&name};
  double before = 0.0;
  for (std::string line; std::getline(from, line);) {
    ++at.line;
    if (!line.empty() && line.back() == '\r') {
      line.pop_back();
    }
    if (line.empty()) {
      continue;
    }
    if (!format) {
      format = format_of(line, at);
      if (!line.starts_with("{")) {
        continue;
      }
    }
    auto const said = format->read(line, at);
    if (format->is_in_order() && said.at_s < before) {
      at.refuse(
          fmt::format("its time is {:.3f} s before that of a line above", before - said.at_s));
    }
    before = said.at_s;
    maker.add(said);
  }
  if (from.bad()) {
    throw error{error_kind::unavailable, fmt::format("{} cannot be read to its end", name)};
  }
  return maker.finish(name);
}

trace read_trace(std::string const& file, trace_reading const& how) {
  std::ifstream from{file};
  if (!from) {
    throw error{error_kind::not_found,
                fmt::format("the trace {} cannot be opened: {}", file, std::strerror(errno))};
  }
  return read_trace(from, file, how);
}

}  // namespace sluice::simulator
