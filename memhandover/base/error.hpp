/// The kinds of failure that Sluice distinguishes, and the exception that carries one.
///
/// Every failure inside the C++ code travels as `sluice::error`. It never crosses a C ABI, the top
/// of a thread or a request handler: there it is turned into a status by the one table in
/// runtime/telemetry/error_table.hpp.
///
///   throw error{error_kind::invalid_argument,
///               "pool.memory is 40GiB but the machine has 23GiB; ask for less"};
#pragma once

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace sluice {

enum class error_kind {
  invalid_argument,   ///< the caller's input is wrong; the message says what would be right
  not_found,          ///< the thing named does not exist (model, pool, file)
  already_exists,     ///< a second one is refused (server of a pool, listening port)
  out_of_memory,      ///< the pool or the device has too little memory for this
  unavailable,        ///< a peer is gone or not ready; trying again later can help
  deadline_exceeded,  ///< the answer did not come in time
  unsupported,        ///< the request is understood, but this build or machine cannot do it
  cancelled,          ///< taken back by its own side (a discarded micro-batch)
  aborted,            ///< the process that worked on it has ended
  model_error,        ///< a served model has raised an exception while it computed
  misconfigured,  ///< what an operator has written contradicts what it describes; no caller's doing
  internal,       ///< a broken invariant: a bug in Sluice, or a corrupted ledger
};

/// The kind's name as it stands in logs and on the command line, e.g. "invalid_argument".
[[nodiscard]] constexpr std::string_view to_string(error_kind kind) noexcept {
  switch (kind) {
    case error_kind::invalid_argument:
      return "invalid_argument";
    case error_kind::not_found:
      return "not_found";
    case error_kind::already_exists:
      return "already_exists";
    case error_kind::out_of_memory:
      return "out_of_memory";
    case error_kind::unavailable:
      return "unavailable";
    case error_kind::deadline_exceeded:
      return "deadline_exceeded";
    case error_kind::unsupported:
      return "unsupported";
    case error_kind::cancelled:
      return "cancelled";
    case error_kind::aborted:
      return "aborted";
    case error_kind::model_error:
      return "model_error";
    case error_kind::misconfigured:
      return "misconfigured";
    case error_kind::internal:
      return "internal";
  }
  return "internal";
}

/// An exception with a kind. `what()` is a sentence for the user, without kind or file name.
class error : public std::runtime_error {
 public:
  error(error_kind kind, std::string const& message,
        std::optional<std::chrono::milliseconds> retry_after = std::nullopt)
      : std::runtime_error(message), kind_(kind), retry_after_(retry_after) {}
  [[nodiscard]] error_kind kind() const noexcept { return kind_; }
  /// Before that time it fails again; nothing: not known.
  [[nodiscard]] std::optional<std::chrono::milliseconds> retry_after() const noexcept {
    return retry_after_;
  }

 private:
  error_kind kind_;
  std::optional<std::chrono::milliseconds> retry_after_;
};

}  // namespace sluice
