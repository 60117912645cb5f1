/// A body for Beast that is taken out piece by piece while it is read, so that it lies nowhere as a whole.
#pragma once

#include <boost/asio/buffer.hpp>
#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/optional.hpp>
#include <cstdint>
#include <string>

namespace sluice::server {

struct passing_body {
  /// What has come and has not been taken.
  using value_type = std::string;

  class reader {
   public:
    template <bool IsRequest, class Fields>
    reader(boost::beast::http::header<IsRequest, Fields>& /*head*/, value_type& into)
        : into_(into) {}

    static void init(boost::optional<std::uint64_t> const& /*length*/,
                     boost::beast::error_code& failure) {
      failure = {};
    }
    template <class Buffers>
    std::size_t put(Buffers const& buffers, boost::beast::error_code& failure) {
      failure = {};
      std::size_t taken = 0;
      for (auto const piece : boost::beast::buffers_range_ref(buffers)) {
        into_.append(static_cast<char const*>(piece.data()), piece.size());
        taken += piece.size();
      }
      return taken;
    }
    static void finish(boost::beast::error_code& failure) { failure = {}; }

   private:
    value_type& into_;
  };
};

}  // namespace sluice::server
