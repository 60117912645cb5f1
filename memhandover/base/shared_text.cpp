#include "memhandover/base/shared_text.hpp"

#include <algorithm>
#include <cstring>

namespace sluice::memhandover {
namespace {

/// Length of the character that `text` begins with, 0 if it is not well-formed (The Unicode
/// Standard, table 3-7).
std::size_t character_at_start(std::string_view text) {
  auto const byte = [text](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  auto const first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  std::size_t const length = first >= 0xc2 && first <= 0xdf   ? 2
                             : first >= 0xe0 && first <= 0xef ? 3
                             : first >= 0xf0 && first <= 0xf4 ? 4
                                                              : 0;
  if (length == 0 || text.size() < length) {
    return 0;
  }
  // The second byte's range keeps out longer forms than need be, surrogates, and what is too high.
  auto const lowest = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  auto const highest = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  bool well_formed = byte(1) >= lowest && byte(1) <= highest;
  for (std::size_t i = 2; i < length; ++i) {
    well_formed = well_formed && (byte(i) & 0xc0U) == 0x80;
  }
  return well_formed ? length : 0;
}

}  // namespace

std::string_view cut_text(std::string_view text, std::size_t bytes) {
  text = text.substr(0, text.find('\0'));
  if (text.size() <= bytes) {
    return text;
  }
  constexpr std::size_t longest_character = 4;
  for (auto start = bytes - std::min(bytes, longest_character - 1); start < bytes; ++start) {
    if (start + character_at_start(text.substr(start)) > bytes) {
      return text.substr(0, start);
    }
  }
  return text.substr(0, bytes);
}

std::string readable_text(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    auto const length = character_at_start(text);
    auto const character = text.substr(0, length);
    bool const is_control = length == 1   ? character < " " || character == "\x7f"
                            : length == 2 ? character < "\xc2\xa0"
                                          : false;
    if (length == 0 || is_control) {
      result += '?';
    } else {
      result += character;
    }
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return result;
}

void store_text(std::span<std::atomic<std::uint64_t>> to, std::string_view text) {
  text = cut_text(text, to.size_bytes() - 1);
  for (auto& where : to) {
    std::uint64_t word = 0;
    text = text.substr(text.copy(reinterpret_cast<char*>(&word), sizeof word));
    where.store(word, std::memory_order_relaxed);
  }
}

std::string load_text(std::span<std::atomic<std::uint64_t> const> from) {
  std::string text(from.size_bytes(), '\0');
  for (std::size_t i = 0; i < from.size(); ++i) {
    auto const word = from[i].load(std::memory_order_relaxed);
    std::memcpy(text.data() + i * sizeof word, &word, sizeof word);
  }
  return text.substr(0, text.find('\0'));
}

}  // namespace sluice::memhandover
