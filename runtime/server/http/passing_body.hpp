/// A body for Beast that is taken out piece by piece while it is read, so that it lies nowhere as a whole.
///
///   take_pieces(parser, buffer, failure,
///               [&](std::string const& piece) { return to.append(piece).size() < enough; });
#pragma once

#include <boost/asio/buffer.hpp>
#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/error.hpp>
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

/// Parses what is in `from` and gives the pieces of the body to `take`, until that says false: it has enough. False: it is not
/// HTTP, or more than may be.
template <typename Parser, typename Take>
bool take_pieces(Parser& parser, boost::beast::flat_buffer& from,
                 boost::system::error_code& failure, Take const& take) {
  failure = {};
  for (bool wants_more = true; wants_more && !parser.is_done() && from.size() > 0;) {
    auto const used = parser.put(from.data(), failure);
    from.consume(used);
    auto& came = parser.get().body();
    wants_more = take(came) && used > 0;
    came.clear();
    if (failure == boost::beast::http::error::need_more) {
      failure = {};
      return true;
    }
    if (failure) return false;
  }
  return true;
}

}  // namespace sluice::server
