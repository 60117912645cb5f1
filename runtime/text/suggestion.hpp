/// What a mistyped word was probably meant to be.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace sluice::text {

/// Optimal string alignment distance: insertions, deletions, substitutions and swaps of neighbours.
/// Source: Damerau, CACM 7 (1964), in the restricted form.
[[nodiscard]] std::size_t edit_distance(std::string_view a, std::string_view b);

/// The nearest of `known` within a third of its length (at least one edit), ignoring case; nothing
/// if none is near.
[[nodiscard]] std::optional<std::string_view> nearest(std::string_view written,
                                                      std::span<std::string_view const> known);

/// `did you mean "near"?`, or `known are a, b, c` if nothing is near.
[[nodiscard]] std::string suggestion(std::string_view written,
                                     std::span<std::string_view const> known);

}  // namespace sluice::text
