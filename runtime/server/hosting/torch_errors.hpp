/// What torch throws, as errors of ours: the text without stack trace, and a kind. Knows no torch.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <string_view>

#include "memhandover/base/error.hpp"

namespace sluice::server {

/// The first line of a message, without what torch appends to it about itself.
[[nodiscard]] std::string first_line(std::string_view message);

/// Of a longer text that much is told, in bytes.
inline constexpr std::size_t longest_meaning = 4096;

/// What went wrong, with all its lines: where TorchScript's interpreter shows a traceback, what comes after it, without
/// the name of the exception before it.
[[nodiscard]] std::string meaning_of(std::string_view message);

/// What kind of failure a message of torch tells of: memory, device, or `otherwise`.
[[nodiscard]] error_kind kind_of(std::string_view message, error_kind otherwise);

/// Throws `failure` as `sluice::error` with "`doing`: " before its message; a `sluice::error` keeps
/// its kind.
[[noreturn]] void rethrow_as_error(std::string const& doing, error_kind otherwise,
                                   std::exception_ptr failure = std::current_exception());

}  // namespace sluice::server
