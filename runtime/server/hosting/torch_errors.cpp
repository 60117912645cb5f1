#include "runtime/server/hosting/torch_errors.hpp"

#include <array>
#include <cctype>
#include <new>

namespace sluice::server {
namespace {

std::string_view line_at(std::string_view text, std::size_t start) {
  return text.substr(start, text.find('\n', start) - start);
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
  while (start < message.size() && std::isspace(static_cast<unsigned char>(message[start])) != 0) {
    ++start;
  }
  auto line = line_at(message, start);
  if (auto const origin = line.find(" (Exception raised from "); origin != std::string_view::npos) {
    line = line.substr(0, origin);
  }
  return std::string{line};
}

std::string meaning_of(std::string_view message) {
  if (message.find("Traceback of TorchScript") == std::string_view::npos) {
    return first_line(message);
  }
  // A traceback may quote the source, where such lines can stand too: the last one counts.
  std::string_view found;
  for (std::size_t start = 0; start < message.size();) {
    auto const line = line_at(message, start);
    if (auto const text = after_error_name(line); !text.empty()) {
      found = text;
    }
    start += line.size() + 1;
  }
  return found.empty() ? first_line(message) : first_line(found);
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
    throw error{known.kind(), doing + ": " + known.what()};
  } catch (std::bad_alloc const&) {
    throw error{error_kind::out_of_memory, doing + ": this process is out of memory"};
  } catch (std::exception const& foreign) {
    throw error{kind_of(foreign.what(), otherwise), doing + ": " + meaning_of(foreign.what())};
  } catch (...) {
    throw error{error_kind::internal, doing + ": an exception of unknown type was thrown"};
  }
}

}  // namespace sluice::server
