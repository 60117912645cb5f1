#include "runtime/server/hosting/torch_errors.hpp"

#include <array>
#include <cctype>
#include <new>

namespace sluice::server {
namespace {

std::string_view line_at(std::string_view text, std::size_t start) {
  return text.substr(start, text.find('\n', start) - start);
}

bool is_space(char c) {
  return std::isspace(static_cast<unsigned char>(c)) != 0;
}

/// Without what torch appends about itself, without blanks around it, and no longer than `longest_meaning`.
std::string bounded(std::string_view text) {
  for (std::string_view const own : {" (Exception raised from ", "\nException raised from "}) {
    text = text.substr(0, text.find(own));
  }
  while (!text.empty() && is_space(text.front())) {
    text.remove_prefix(1);
  }
  while (!text.empty() && is_space(text.back())) {
    text.remove_suffix(1);
  }
  if (text.size() <= longest_meaning) {
    return std::string{text};
  }
  auto end = longest_meaning;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) {
    --end;  // not within a character of UTF-8
  }
  return std::string{text.substr(0, end)} + " …";
}

/// "RuntimeError: text" → "text"; empty for any other line.
std::string_view after_error_name(std::string_view line) {
  auto const colon = line.find(": ");
  if (colon == std::string_view::npos) {
    return {};
  }
  auto const name = line.substr(0, colon);
  for (char const each : name) {
    if (std::isalnum(static_cast<unsigned char>(each)) == 0 && each != '_' && each != '.') {
      return {};
    }
  }
  bool const is_error = name.ends_with("Error") || name.ends_with("Exception");
  return is_error ? line.substr(colon + 2) : std::string_view{};
}

template <std::size_t N>
bool holds_one_of(std::string_view text, std::array<std::string_view, N> const& words) {
  for (auto const word : words) {
    if (text.find(word) != std::string_view::npos) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::string first_line(std::string_view message) {
  std::size_t start = 0;
  while (start < message.size() && is_space(message[start])) {
    ++start;
  }
  auto line = line_at(message, start);
  if (auto const origin = line.find(" (Exception raised from "); origin != std::string_view::npos) {
    line = line.substr(0, origin);
  }
  return std::string{line};
}

std::string meaning_of(std::string_view message) {
  constexpr std::string_view traceback{"Traceback of TorchScript"};
  auto start = message.find(traceback);
  if (start == std::string_view::npos) {
    return bounded(message);
  }
  // Files and the source that it quotes are indented; what comes then is the exception's text, to the end.
  while (start < message.size()) {
    auto const line = line_at(message, start);
    bool const belongs_to_it = line.empty() || line.front() == ' ' || line.starts_with(traceback);
    if (auto const text = after_error_name(line); !belongs_to_it && !text.empty()) {
      return bounded(message.substr(start + line.size() - text.size()));
    }
    start += line.size() + 1;
  }
  return first_line(message);
}

error_kind kind_of(std::string_view message, error_kind otherwise) {
  static constexpr std::array<std::string_view, 4> memory{
      "out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"};
  static constexpr std::array<std::string_view, 5> device{
      "CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS_", "INTERNAL ASSERT FAILED"};
  if (holds_one_of(message, memory)) {
    return error_kind::out_of_memory;
  }
  return holds_one_of(message, device) ? error_kind::internal : otherwise;
}

void rethrow_as_error(std::string const& doing, error_kind otherwise, std::exception_ptr failure) {
  try {
    std::rethrow_exception(std::move(failure));
  } catch (error const& known) {
    throw error{known.kind(), doing + ": " + known.what(), known.retry_after()};
  } catch (std::bad_alloc const&) {
    throw error{error_kind::out_of_memory, doing + ": this process is out of memory"};
  } catch (std::exception const& foreign) {
    throw error{kind_of(foreign.what(), otherwise), doing + ": " + meaning_of(foreign.what())};
  } catch (...) {
    throw error{error_kind::internal, doing + ": an exception of unknown type was thrown"};
  }
}

}  // namespace sluice::server
