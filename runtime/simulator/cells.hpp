/// Tables for people and cells of CSV.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace sluice::simulator {

/// Quoted if it holds a comma, a quote or the end of a line.
[[nodiscard]] std::string csv_cell(std::string const& text);

/// Columns below each other, numbers to the right and those of `names` to the left; all lines have as many cells as the first.
[[nodiscard]] std::string aligned(std::vector<std::vector<std::string>> const& lines,
                                  std::vector<std::size_t> const& names);

}  // namespace sluice::simulator
