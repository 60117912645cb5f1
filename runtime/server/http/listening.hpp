/// The address that an endpoint listens on.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstdint>
#include <string>

namespace sluice::server {

/// `host` is an IP address or "localhost"; throws `invalid_argument`.
[[nodiscard]] boost::asio::ip::tcp::endpoint address_of(std::string const& host,
                                                        std::uint16_t port);
/// "127.0.0.1:8000", "[::1]:8000".
[[nodiscard]] std::string address_text(boost::asio::ip::tcp::endpoint const& address);

/// On a strand of `io`. Throws `already_exists` when the port is taken, `invalid_argument` for what cannot be listened on.
[[nodiscard]] boost::asio::ip::tcp::acceptor listen(boost::asio::io_context& io,
                                                    boost::asio::ip::tcp::endpoint const& address);

}  // namespace sluice::server
