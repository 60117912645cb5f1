#include "runtime/text/suggestion.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <limits>
#include <vector>

namespace sluice::text {
namespace {

std::string lower(std::string_view text) {
  std::string result{text};
  std::transform(result.begin(), result.end(), result.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

}  // namespace

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last(b.size() + 1);
  std::vector<std::size_t> last(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) {
    last[j] = j;
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      bool const same = a[i - 1] == b[j - 1];
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same ? 0U : 1U)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before_last[j - 2] + 1);
      }
    }
    std::swap(before_last, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

std::optional<std::string_view> nearest(std::string_view written,
                                        std::span<std::string_view const> known) {
  constexpr std::size_t longest =
      100;  // a longer word is no typing mistake, and the distance is quadratic
  if (written.size() > longest) {
    return std::nullopt;
  }
  std::optional<std::string_view> best;
  auto best_distance = std::numeric_limits<std::size_t>::max();
  for (auto const candidate : known) {
    auto const distance = edit_distance(lower(written), lower(candidate));
    auto const near_enough = std::max<std::size_t>(1, candidate.size() / 3);
    if (distance <= near_enough && distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string suggestion(std::string_view written, std::span<std::string_view const> known) {
  if (auto const meant = nearest(written, known)) {
    return fmt::format("did you mean \"{}\"?", *meant);
  }
  return fmt::format("known are {}", fmt::join(known, ", "));
}

}  // namespace sluice::text
