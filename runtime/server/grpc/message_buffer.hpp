/// gRPC's buffers as the codec has messages.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/grpc/message_codec.hpp"

namespace sluice::server {

/// The bytes of a message that has come, decompressed if it was compressed.
class received_message {
 public:
  /// Throws `invalid_argument` for what is corrupt.
  received_message(grpc::ByteBuffer& buffer, std::uint64_t most);
  received_message(received_message const&) = delete;
  received_message& operator=(received_message const&) = delete;
  received_message(received_message&&) = delete;
  received_message& operator=(received_message&&) = delete;
  ~received_message() = default;

  /// It would be more than `most` bytes when decompressed, of which no more have been made.
  [[nodiscard]] bool is_too_large() const noexcept { return is_too_large_; }
  /// They live as long as it does.
  [[nodiscard]] std::vector<std::string_view> const& parts() const noexcept { return parts_; }
  [[nodiscard]] std::string joined() const;

 private:
  std::vector<grpc::Slice> slices_;
  std::string decompressed_;
  bool is_too_large_ = false;
  std::vector<std::string_view> parts_;
};

/// Without a copy: the buffer keeps the pieces.
[[nodiscard]] grpc::ByteBuffer buffer_of(message_pieces const& pieces);

}  // namespace sluice::server
