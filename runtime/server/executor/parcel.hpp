/// Requests and their results on the way between a server and its executor: a message whose tensors stand beside it, or in
/// a file without a name if they are large, so that the socket never carries much. Who sends writes them there once;
/// who receives has them where they lie: the file is sealed, and mapped for that process alone.
///
///   auto const parcel = wrap(request);
///   if (!parcel.try_send(socket)) {
///     // … the socket is full: again, once it can be written …
///   }
///   // … at the other end …
///   auto const seen = unwrap_request(*memhandover::receive_any(socket).received);
///
/// Those that there are many of, requests and results, are plain messages: their fields stand one after the other.
/// All else is JSON.
/// What comes from the other side is checked: `invalid_argument` says that it is no such message.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/base/unique_fd.hpp"
#include "memhandover/base/wire.hpp"
#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

enum class parcel_form : char { json, request, result };

struct parcel {
  nlohmann::json body;           ///< its "type" and all that is not in the tensors
  std::vector<std::byte> bytes;  ///< of all tensors, one after the other
  memhandover::unique_fd file;   ///< which holds them instead, if they are too many

  parcel_form form = parcel_form::json;
  // Of a plain one, which has no body:
  std::vector<std::byte> fields{};  ///< all that is not below
  request_ticket ticket = 0;
  std::size_t place = 0;  ///< of its model
  bool is_alone = false, is_suspect = false;
  std::optional<std::chrono::nanoseconds> expected{};

  /// False if the socket is full. Throws `unavailable` if nobody is at its other end.
  [[nodiscard]] bool try_send(int socket) const;
};

/// Throws `out_of_memory` or `unavailable` if there is no file for large tensors. What a client chose for itself, the
/// request's id, stays with the server; its mark goes along.
[[nodiscard]] parcel wrap(infer_request const& request);
[[nodiscard]] parcel wrap(infer_result const& result);

[[nodiscard]] infer_request unwrap_request(memhandover::message const& message);
[[nodiscard]] infer_result unwrap_result(memhandover::message const& message);

/// What is known of a plain message before it is taken apart. Throws if it is none.
struct plain_facts {
  parcel_form form = parcel_form::json;
  bool is_alone = false, is_suspect = false;
  std::uint32_t field_bytes = 0;
  request_ticket ticket = 0;
  std::uint64_t place = 0;
  std::optional<std::chrono::nanoseconds> expected{};
};
[[nodiscard]] plain_facts facts_of(memhandover::message const& message);
/// Of the computation that a plain result came from.
[[nodiscard]] batch_share batch_of(memhandover::message const& result);

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
/// The same of the model in a place, as a list of those that cannot be served has it.
[[nodiscard]] nlohmann::json failure_at(std::size_t place, error const& why);

}  // namespace sluice::server
