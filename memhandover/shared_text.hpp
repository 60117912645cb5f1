/// Texts of a fixed size in shared memory: cut to their place when they are written, and made fit
/// for a message and a terminal when they are read, since a damaged one may hold anything.
///
/// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace sluice::memhandover {

/// The beginning of `text`, up to its first zero byte, that takes at most `bytes` and does not end
/// inside a character of UTF-8.
[[nodiscard]] std::string_view cut_text(std::string_view text, std::size_t bytes);

/// `text` with a question mark for every control character and every byte that is not UTF-8.
[[nodiscard]] std::string readable_text(std::string_view text);

}  // namespace sluice::memhandover
