#include "runtime/cli/detail/parking_text.hpp"

#include <fmt/format.h>

#include <vector>

#include "runtime/cli/detail/json_text.hpp"

namespace sluice::cli::detail {
namespace {

using nlohmann::json;

/// Of the window that has just ended.
std::string resident_share(json const& parking) {
  auto const& window = field(parking, "window_ms");
  auto const& resident = field(parking, "resident_ms");
  return window.is_number() && resident.is_number() && window.get<double>() > 0
             ? fmt::format("{:.1f}%", 100.0 * resident.get<double>() / window.get<double>())
             : nothing;
}

/// For how much longer an operator has a job parked.
std::string hold_text(json const& by_operator) {
  if (!by_operator.is_object()) {
    return nothing;
  }
  auto const& left = field(by_operator, "left_s");
  auto const until = left.is_number() ? fmt::format("for another {:.0f} s", left.get<double>())
                                      : std::string{"until it is woken"};
  return field(by_operator, "done") == json(true) ? until : until + ", is going";
}

}  // namespace

std::string parking_text(json const& clients) {
  std::vector<row> rows{{"slot", "parked", "dirty", "clean", "zero", "on disk", "times", "away",
                         "resident", "waits", "owed in", "missed", "by an operator"}};
  for (auto const& client : clients.is_array() ? clients : json::array()) {
    auto const& parking = field(client, "parking");
    auto const& times = field(parking, "parks");
    auto const& by_operator = field(parking, "operator");
    if ((times.is_number() && times != json(0)) || by_operator.is_object()) {
      rows.push_back({plain(field(client, "slot")), bytes(field(parking, "parked_bytes")),
                      bytes(field(parking, "dirty_bytes")), bytes(field(parking, "clean_bytes")),
                      bytes(field(parking, "zero_bytes")), bytes(field(parking, "disk_bytes")),
                      plain(times), milliseconds_of_us(field(parking, "away_us")),
                      resident_share(parking), milliseconds(field(parking, "waits_ms")),
                      milliseconds(field(parking, "owed_in_ms")),
                      milliseconds_of_us(field(parking, "missed_us")), hold_text(by_operator)});
    }
  }
  return rows.size() > 1 ? "parked\n" + table(rows) : std::string{};
}

}  // namespace sluice::cli::detail
