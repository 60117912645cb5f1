#include "runtime/server/grpc/grpc_listener.hpp"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <chrono>
#include <exception>
#include <future>
#include <optional>
#include <utility>

#include "runtime/server/http/listening.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

namespace net = boost::asio;
using net::ip::tcp;

namespace {

constexpr std::chrono::milliseconds accept_pause{50};

/// Which socket a descriptor is of, if it is one's.
std::optional<ino_t> socket_of(int descriptor) {
  struct stat about {};
  if (::fstat(descriptor, &about) != 0 || !S_ISSOCK(about.st_mode)) return std::nullopt;
  return about.st_ino;
}

}  // namespace

grpc_listener::grpc_listener(net::io_context& io, std::string const& host, std::uint16_t port,
                             std::size_t most)
    : io_(io),
      acceptor_(listen(io, address_of(host, port))),
      pause_(acceptor_.get_executor()),
      local_(acceptor_.local_endpoint()),
      most_(most) {}

void grpc_listener::start(receiver give) {
  give_ = std::move(give);
  net::post(acceptor_.get_executor(), [this] { accept(); });
}

void grpc_listener::stop() {
  std::promise<void> done;
  net::post(acceptor_.get_executor(), [this, &done] {
    boost::system::error_code ignored;
    acceptor_.close(ignored);
    pause_.cancel();
    done.set_value();
  });
  done.get_future().wait();
}

void grpc_listener::accept() {
  if (!acceptor_.is_open()) return;
  acceptor_.async_accept(io_, [this](boost::system::error_code failure, tcp::socket connection) {
    on_accepted(failure, std::move(connection));
  });
}

void grpc_listener::on_accepted(boost::system::error_code failure, tcp::socket connection) {
  if (!acceptor_.is_open()) return;
  if (failure) {
    spdlog::warn("a connection could not be accepted for gRPC reason={}",
                 telemetry::quoted(failure.message()));
    pause_.expires_after(accept_pause);
    pause_.async_wait([this](boost::system::error_code cancelled) {
      if (!cancelled) accept();
    });
    return;
  }
  try {
    if (has_room()) take_in(std::move(connection));
  } catch (std::exception const& reason) {
    spdlog::error("a connection could not be taken in for gRPC reason={}",
                  telemetry::quoted(reason.what()));
  }
  accept();
}

bool grpc_listener::has_room() {
  if (open_.size() < most_) return true;
  std::erase_if(open_,
                [](taken_in const& each) { return socket_of(each.descriptor) != each.socket; });
  return open_.size() < most_;
}

void grpc_listener::take_in(tcp::socket connection) {
  boost::system::error_code ignored;
  connection.set_option(tcp::no_delay{true}, ignored);
  connection.non_blocking(true, ignored);
  auto const socket = socket_of(connection.native_handle());
  int const descriptor = connection.release(ignored);
  if (descriptor < 0) return;
  if (socket) open_.push_back({descriptor, *socket});
  give_(descriptor);
}

}  // namespace sluice::server
