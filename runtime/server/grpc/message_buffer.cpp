#include "runtime/server/grpc/message_buffer.hpp"

#include <fmt/format.h>
#include <grpc/byte_buffer_reader.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/content_coding.hpp"

namespace sluice::server {
namespace {

/// Looks at what gRPC's C++ layer does not show: how a message is compressed. The endpoint has gRPC leave it so, since gRPC's own
/// decompression has no limit.
class coding_reader : public grpc::ProtoBufferReader {
 public:
  explicit coding_reader(grpc::ByteBuffer* buffer) : ProtoBufferReader(buffer) {}

  [[nodiscard]] content_coding coding() {
    switch (reader()->buffer_in->data.raw.compression) {
      case GRPC_COMPRESS_DEFLATE:
        return content_coding::deflate;
      case GRPC_COMPRESS_GZIP:
        return content_coding::gzip;
      default:
        return content_coding::identity;
    }
  }
};

content_coding coding_of(grpc::ByteBuffer& buffer) {
  return coding_reader{&buffer}.coding();
}

}  // namespace

received_message::received_message(grpc::ByteBuffer& buffer, std::uint64_t most) {
  auto const coding = coding_of(buffer);
  if (!buffer.Dump(&slices_).ok()) {
    throw error{error_kind::internal, "a message of gRPC's cannot be read"};
  }
  for (auto const& each : slices_) {
    // gRPC's slices are bytes without a type.
    parts_.emplace_back(reinterpret_cast<char const*>(each.begin()),  // NOLINT(*-reinterpret-cast)
                        each.size());
  }
  if (coding == content_coding::identity) return;
  auto text = decompressed(joined(), coding, most);
  is_too_large_ = !text;
  decompressed_ = std::move(text).value_or("");
  slices_.clear();
  parts_.assign(1, decompressed_);
}

std::string received_message::joined() const {
  std::string result;
  for (auto const& each : parts_) result += each;
  return result;
}

grpc::ByteBuffer buffer_of(message_pieces const& pieces) {
  std::vector<grpc::Slice> slices;
  slices.reserve(pieces.size());
  for (auto const& each : pieces) {
    if (each.empty()) continue;
    auto* const kept = new tensor_bytes{each};  // NOLINT(*-owning-memory): gRPC gives it back
    slices.emplace_back(
        kept->data(), kept->size(),
        [](void* mine) { delete static_cast<tensor_bytes*>(mine); },  // NOLINT(*-owning-memory)
        kept);
  }
  return {slices.data(), slices.size()};
}

}  // namespace sluice::server
