/// What torch throws, as errors of ours: one line without stack trace, and a kind. Knows no torch.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "memhandover/base/error.hpp"

namespace sluice::server {

/// The first line of a message, without what torch appends to it about itself.
[[nodiscard]] std::string first_line(std::string_view message);

/// The line that says what went wrong: where TorchScript's interpreter shows a traceback, the one
/// after it, of the form "SomeError: text", without the name of the error; else the first.
[[nodiscard]] std::string meaning_of(std::string_view message);

/// What kind of failure a message of torch tells of: memory, device, or `otherwise`.
[[nodiscard]] error_kind kind_of(std::string_view message, error_kind otherwise);

/// Throws `failure` as `sluice::error` with "`doing`: " before its message; a `sluice::error` keeps
/// its kind.
[[noreturn]] void rethrow_as_error(std::string const& doing, error_kind otherwise,
                                   std::exception_ptr failure = std::current_exception());

}  // namespace sluice::server
