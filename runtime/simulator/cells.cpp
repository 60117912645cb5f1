#include "runtime/simulator/cells.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace sluice::simulator {

std::string csv_cell(std::string const& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) {
    return text;
  }
  std::string quoted = "\"";
  for (char const each : text) {
    quoted += each == '"' ? std::string(2, '"') : std::string(1, each);
  }
  return quoted + '"';
}

std::string aligned(std::vector<std::vector<std::string>> const& lines,
                    std::vector<std::size_t> const& names) {
  if (lines.empty()) {
    return {};
  }
  std::vector<std::size_t> widths(lines.front().size());
  for (auto const& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) {
      widths[i] = std::max(widths[i], line[i].size());
    }
  }
  std::string text;
  for (auto const& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) {
      bool const is_name = std::find(names.begin(), names.end(), i) != names.end();
      bool const is_last = i + 1 == line.size();
      text += i == 0 ? "" : "  ";
      text += is_name ? fmt::format("{:<{}}", line[i], is_last ? 0 : widths[i])
                      : fmt::format("{:>{}}", line[i], widths[i]);
    }
    text += '\n';
  }
  return text;
}

}  // namespace sluice::simulator
