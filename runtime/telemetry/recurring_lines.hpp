/// Which log lines are written of what may come again and again, as often as there are requests: a text when it first
/// comes, and then how often it has come since, less and less often.
///
///   recurring_lines lines;
///   if (auto const due = lines.on(text, recurring_lines::clock::now())) {
///     spdlog::warn("it has failed reason={} repeated={}", text, due->repeated);
///   }
///
/// However many texts there are, and however different: no more lines than `most_at_once`, and one more each `refill`.
/// Pure: the caller has the clock. Not thread-safe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <string_view>

namespace sluice::telemetry {

class recurring_lines {
 public:
  using clock = std::chrono::steady_clock;
  static constexpr std::size_t most_at_once = 16;
  static constexpr std::chrono::minutes refill{1};
  /// Between two lines of one text; twice as long each time.
  static constexpr std::chrono::minutes first_pause{1}, longest_pause{60};
  /// Of the texts that came last; one that is not among them counts as new.
  static constexpr std::size_t most_known = 32;

  struct line {
    std::uint64_t repeated = 0;  ///< how often that text has come since its last line
    std::uint64_t others = 0;    ///< and texts of which no line has been written, since any was
  };

  /// That `text` comes now; the line to be written of it, if there is to be one.
  [[nodiscard]] std::optional<line> on(std::string_view text, clock::time_point now);

 private:
  struct known {
    std::string text;
    clock::time_point next_line;
    std::chrono::minutes pause{0};
    std::uint64_t repeated = 0;
  };

  [[nodiscard]] bool take_line(clock::time_point now);
  [[nodiscard]] known& find(std::string_view text, clock::time_point now);

  std::list<known> known_;  ///< the latest first
  std::size_t lines_ = most_at_once;
  std::optional<clock::time_point> refilled_;
  std::uint64_t others_ = 0;
};

}  // namespace sluice::telemetry
