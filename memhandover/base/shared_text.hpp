/// Texts of a fixed size in shared memory: cut to their place when they are written, and made fit
/// for a message and a terminal when they are read, since a damaged one may hold anything.
///
/// A text that is read while it is written stands in words of eight bytes each, and ends with a zero
/// byte; who reads it meanwhile may see a part of each.
///
/// Thread-safety: all functions from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace sluice::memhandover {

/// The beginning of `text`, up to its first zero byte, that takes at most `bytes` and does not end
/// inside a character of UTF-8.
[[nodiscard]] std::string_view cut_text(std::string_view text, std::size_t bytes);

/// `text` with a question mark for every control character and every byte that is not UTF-8.
[[nodiscard]] std::string readable_text(std::string_view text);

/// Writes `text` into words, cut to what fits.
void store_text(std::span<std::atomic<std::uint64_t>> to, std::string_view text);
[[nodiscard]] std::string load_text(std::span<std::atomic<std::uint64_t> const> from);

}  // namespace sluice::memhandover
