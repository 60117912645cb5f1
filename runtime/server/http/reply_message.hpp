/// An answer as it is written to a socket.
#pragma once

#include <boost/beast/http/message_generator.hpp>
#include <cstddef>

#include "runtime/server/http/api.hpp"

namespace sluice::server {

/// Up to here a body is turned into tensors, or tensors into a body, within some hundred microseconds.
inline constexpr std::size_t small_body = std::size_t{64} << 10U;

/// Whether it takes long to write it; tensors that are sent as they are do not.
[[nodiscard]] bool is_large(infer_result const& result, output_form const& form);

struct message_form {
  unsigned version = 11;  ///< of HTTP, as its client has it
  bool is_head = false;   ///< it goes without its body
  bool keep_alive = false;
};

[[nodiscard]] boost::beast::http::message_generator message_of(http_reply answer,
                                                               message_form const& form);

}  // namespace sluice::server
