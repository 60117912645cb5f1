/// Requests and their results on the way between a server and its executor: a message whose tensors stand beside it, or in
/// a file without a name if they are large, so that the socket never carries much. Who sends writes them there once;
/// who receives has them where they lie: the file is sealed, and mapped for that process alone.
///
///   auto const parcel = wrap(request);
///   if (!parcel.try_send(socket)) {
///     // … the socket is full: again, once it can be written …
///   }
///   auto const seen = unwrap_request(*memhandover::receive_message(socket));   // at the other end
///
/// What comes from the other side is checked: `invalid_argument` says that it is no such message.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "memhandover/base/unique_fd.hpp"
#include "memhandover/base/wire.hpp"
#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

struct parcel {
  nlohmann::json body;           ///< its "type" and all that is not in the tensors
  std::vector<std::byte> bytes;  ///< of all tensors, one after the other
  memhandover::unique_fd file;   ///< which holds them instead, if they are too many

  /// False if the socket is full. Throws `unavailable` if nobody is at its other end.
  [[nodiscard]] bool try_send(int socket) const;
};

/// Throws `out_of_memory` or `unavailable` if there is no file for large tensors. What a client chose for itself, the
/// request's id, stays with the server.
[[nodiscard]] parcel wrap(infer_request const& request);
[[nodiscard]] parcel wrap(infer_result const& result);

[[nodiscard]] infer_request unwrap_request(memhandover::message const& message);
[[nodiscard]] infer_result unwrap_result(memhandover::message const& message);

/// A text of any length beside a message, in the place of tensors.
[[nodiscard]] parcel wrap_text(nlohmann::json body, std::string const& text);
[[nodiscard]] std::string unwrap_text(memhandover::message const& message);

/// Why a message is of no use that has lost its descriptors.
[[nodiscard]] error lost_tensors();

/// Whether reading it takes long.
[[nodiscard]] inline bool is_large(memhandover::message const& message) noexcept {
  return !message.descriptors.empty();
}

/// The failure that a message has as `kind` and `error`.
[[nodiscard]] error failure_in(nlohmann::json const& body);

}  // namespace sluice::server
