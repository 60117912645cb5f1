/// The bytes that come from a client and go to it, under TLS or as they are: a stream as Asio and Beast have it.
///
/// Begins as plain; `async_handshake` makes it one under TLS. To be used on the one thread of the socket's executor.
#pragma once

#include <boost/asio/buffer.hpp>
#include <boost/asio/error.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/error.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/beast/core/bind_handler.hpp>
#include <boost/beast/core/flat_stream.hpp>
#include <cstddef>
#include <memory>
#include <string_view>
#include <utility>

#include "runtime/server/http/tls_context.hpp"

namespace sluice::server {

class client_stream {
 public:
  using socket_type = boost::asio::ip::tcp::socket;
  using executor_type = socket_type::executor_type;
  using error_code = boost::system::error_code;

  explicit client_stream(socket_type socket) : socket_(std::move(socket)) {}
  ~client_stream() = default;
  client_stream(client_stream const&) = delete;
  client_stream& operator=(client_stream const&) = delete;
  client_stream(client_stream&&) = delete;
  client_stream& operator=(client_stream&&) = delete;

  [[nodiscard]] executor_type const& get_executor() noexcept { return socket_.get_executor(); }
  [[nodiscard]] socket_type& socket() noexcept { return socket_; }
  [[nodiscard]] bool is_encrypted() const noexcept { return tls_ != nullptr; }

  /// `begin` is what has been read; the handler gets how much of that the handshake took.
  template <typename Handler>
  void async_handshake(std::shared_ptr<tls_context> context, boost::asio::const_buffer begin,
                       Handler&& handler) {
    context_ = std::move(context);
    tls_ = std::make_unique<tls_stream>(socket_, context_->native);
    tls_->next_layer().async_handshake(boost::asio::ssl::stream_base::server, begin,
                                       std::forward<Handler>(handler));
  }

  template <typename Buffers, typename Handler>
  void async_read_some(Buffers const& buffers, Handler&& handler) {
    if (has_ended_) {
      boost::asio::post(get_executor(), boost::beast::bind_front_handler(
                                            std::forward<Handler>(handler),
                                            error_code{boost::asio::error::eof}, std::size_t{0}));
    } else if (tls_) {
      tls_->async_read_some(buffers, std::forward<Handler>(handler));
    } else {
      socket_.async_read_some(buffers, std::forward<Handler>(handler));
    }
  }
  template <typename Buffers, typename Handler>
  void async_write_some(Buffers const& buffers, Handler&& handler) {
    if (tls_) {
      tls_->async_write_some(buffers, std::forward<Handler>(handler));
    } else {
      socket_.async_write_some(buffers, std::forward<Handler>(handler));
    }
  }

  /// What is there, without waiting: `would_block` where nothing is. Any thread may read so while nobody uses the stream otherwise.
  [[nodiscard]] std::size_t read_now(boost::asio::mutable_buffer into, error_code& failure);
  /// How much is to be there before who waits for more is woken, or fewer bytes at the end of all.
  void wake_for(std::size_t bytes) noexcept;

  /// Tells the client that no more comes, and under TLS waits until it says so as well.
  template <typename Handler>
  void async_shutdown(Handler&& handler) {
    if (tls_) {
      tls_->next_layer().async_shutdown(std::forward<Handler>(handler));
    } else {
      boost::asio::post(get_executor(), boost::beast::bind_front_handler(
                                            std::forward<Handler>(handler), error_code{}));
    }
  }

  /// Whether `failure` says that the client has finished sending; then reads find no more, at once. Asio would wait for ever.
  [[nodiscard]] bool note_end(error_code failure) noexcept {
    has_ended_ =
        failure == boost::asio::error::eof || failure == boost::asio::ssl::error::stream_truncated;
    return has_ended_;
  }

  /// Sends a few bytes without waiting, or nothing where there is no room; false if the client has gone.
  [[nodiscard]] bool send_now(std::string_view text);

 private:
  /// Flat: a header and a small body share a record.
  using tls_stream = boost::beast::flat_stream<boost::asio::ssl::stream<socket_type&>>;

  socket_type socket_;
  std::shared_ptr<tls_context> context_;
  std::unique_ptr<tls_stream> tls_;
  bool has_ended_ = false;
  std::size_t wakes_for_ = 1;
};

}  // namespace sluice::server
