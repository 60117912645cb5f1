/// An answer's body for Beast: JSON, and behind it tensors, each written from where it lies.
#pragma once

#include <boost/asio/buffer.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/optional.hpp>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/server/inference/tensor_bytes.hpp"

namespace sluice::server {

struct reply_body {
  struct value_type {
    std::string json;
    std::vector<tensor_bytes> tensors;
  };

  static std::uint64_t size(value_type const& body) {
    std::uint64_t bytes = body.json.size();
    for (auto const& each : body.tensors) bytes += each.size();
    return bytes;
  }

  class writer {
   public:
    using const_buffers_type = std::vector<boost::asio::const_buffer>;

    template <bool is_request, typename Fields>
    writer(boost::beast::http::header<is_request, Fields> const& /*header*/, value_type const& body)
        : body_(body) {}

    static void init(boost::system::error_code& failure) { failure = {}; }
    boost::optional<std::pair<const_buffers_type, bool>> get(boost::system::error_code& failure) {
      failure = {};
      const_buffers_type parts{boost::asio::buffer(body_.json)};
      for (auto const& each : body_.tensors) {
        if (!each.empty()) parts.emplace_back(each.data(), each.size());
      }
      return {{std::move(parts), false}};
    }

   private:
    value_type const& body_;
  };
};

}  // namespace sluice::server
