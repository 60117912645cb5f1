#include "runtime/server/engines/engine_question.hpp"

#include <fmt/format.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <utility>

namespace sluice::server {
namespace {

namespace net = boost::asio;
namespace http = boost::beast::http;
using error_code = boost::system::error_code;

constexpr std::chrono::seconds patience{5};

class engine_inquirer : public std::enable_shared_from_this<engine_inquirer> {
 public:
  engine_inquirer(net::any_io_executor const& io, engine_inquiry what,
                  std::function<void(engine_answer const&)> done)
      : what_(std::move(what)), done_(std::move(done)), socket_(io), timer_(io) {
    if (what_.most_bytes == 0) {
      parser_.body_limit(boost::none);
    } else {
      parser_.body_limit(what_.most_bytes);
    }
  }

  void start(engine_address const& address) {
    timer_.expires_after(patience);
    timer_.async_wait([self = shared_from_this()](error_code cancelled) {
      if (!cancelled) self->end({"it does not answer"});
    });
    auto connected = [self = shared_from_this()](error_code failure) {
      self->on_connected(failure);
    };
    if (address.socket.empty()) {
      socket_.async_connect(net::ip::tcp::endpoint{net::ip::address_v4::loopback(), address.port},
                            std::move(connected));
    } else {
      socket_.async_connect(net::local::stream_protocol::endpoint{address.socket},
                            std::move(connected));
    }
  }
  void give_up() {
    done_ = nullptr;
    end({});
  }

 private:
  void on_connected(error_code failure) {
    if (failure) return end({fmt::format("it does not listen: {}", failure.message())});
    if (what_.path.empty()) return end({});
    request_ =
        fmt::format("GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", what_.path);
    net::async_write(socket_, net::buffer(request_),
                     [self = shared_from_this()](error_code failed, std::size_t /*bytes*/) {
                       self->on_asked(failed);
                     });
  }
  void on_asked(error_code failure) {
    if (failure) return end({failure.message()});
    auto answered = [self = shared_from_this()](error_code failed, std::size_t /*bytes*/) {
      self->on_answer(failed);
    };
    if (what_.most_bytes == 0) {
      http::async_read_header(socket_, buffer_, parser_, std::move(answered));
    } else {
      http::async_read(socket_, buffer_, parser_, std::move(answered));
    }
  }
  void on_answer(error_code failure) {
    if (failure) return end({fmt::format("GET {}: {}", what_.path, failure.message())});
    end({{}, parser_.get().result_int(), std::move(parser_.get().body())});
  }
  void end(engine_answer const& answer) {
    timer_.cancel();
    error_code ignored;
    socket_.close(ignored);
    if (auto const done = std::exchange(done_, nullptr)) done(answer);
  }

  engine_inquiry const what_;
  std::function<void(engine_answer const&)> done_;
  net::generic::stream_protocol::socket socket_;
  net::steady_timer timer_;
  std::string request_;
  boost::beast::flat_buffer buffer_;
  http::response_parser<http::string_body> parser_;
};

}  // namespace

std::shared_ptr<void> ask_engine(net::any_io_executor const& io, engine_address const& address,
                                 engine_inquiry const& what,
                                 std::function<void(engine_answer const&)> done) {
  auto const made = std::make_shared<engine_inquirer>(io, what, std::move(done));
  made->start(address);
  return {made.get(), [made](void* /*self*/) { made->give_up(); }};
}

}  // namespace sluice::server
