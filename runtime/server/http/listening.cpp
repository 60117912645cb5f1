#include "runtime/server/http/listening.hpp"

#include <fmt/format.h>

#include <boost/asio/ip/address.hpp>
#include <boost/asio/strand.hpp>

#include "memhandover/base/error.hpp"

namespace sluice::server {

namespace net = boost::asio;
using net::ip::tcp;

namespace {

[[noreturn]] void listen_failed(tcp::endpoint const& address, boost::system::error_code failure) {
  auto const where = address_text(address);
  if (failure == net::error::address_in_use) {
    throw error{
        error_kind::already_exists,
        fmt::format(
            "cannot listen on {}: the port is taken; end what listens there or choose another port",
            where)};
  }
  if (failure == net::error::access_denied) {
    throw error{error_kind::invalid_argument,
                fmt::format("cannot listen on {}: this user may not; choose a port of 1024 or more",
                            where)};
  }
  throw error{error_kind::invalid_argument,
              fmt::format("cannot listen on {}: {}", where, failure.message())};
}

}  // namespace

tcp::endpoint address_of(std::string const& host, std::uint16_t port) {
  boost::system::error_code failure;
  auto const address = net::ip::make_address(host == "localhost" ? "127.0.0.1" : host, failure);
  if (failure) {
    throw error{
        error_kind::invalid_argument,
        fmt::format(
            "'{}' is no address to listen on; give an IP address, such as 127.0.0.1, or localhost",
            host)};
  }
  return {address, port};
}

std::string address_text(tcp::endpoint const& address) {
  auto const host = address.address().to_string();
  return address.address().is_v6() ? fmt::format("[{}]:{}", host, address.port())
                                   : fmt::format("{}:{}", host, address.port());
}

tcp::acceptor listen(net::io_context& io, tcp::endpoint const& address) {
  boost::system::error_code failure;
  tcp::acceptor acceptor{net::make_strand(io)};
  acceptor.open(address.protocol(), failure);
  if (failure) listen_failed(address, failure);
  // A server that was just restarted must not wait for its predecessor's connections to be
  // forgotten.
  acceptor.set_option(tcp::acceptor::reuse_address{true}, failure);
  acceptor.bind(address, failure);
  if (failure) listen_failed(address, failure);
  acceptor.listen(net::socket_base::max_listen_connections, failure);
  if (failure) listen_failed(address, failure);
  return acceptor;
}

}  // namespace sluice::server
