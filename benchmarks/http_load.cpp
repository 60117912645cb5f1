// Loads an HTTP server from one thread: so many connections, each of which sends the same request again as soon as it has the
// answer to the last one. Prints how many were answered and how long each took, as JSON. With --drop it is a server itself,
// which only receives so many bytes of each request and answers with a few: what a bare loop over a socket can do.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/vector_body.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace sluice::bench {
namespace {

namespace net = boost::asio;
namespace http = boost::beast::http;
using clock = std::chrono::steady_clock;
using tcp = net::ip::tcp;

/// What all connections share.
struct load {
  std::string request;
  clock::time_point counts_from, end;
  clock::time_point first_began = clock::time_point::max(), last_answer;  ///< of those that count
  std::vector<double> took_us;
  std::string failure;
};

class connection : public std::enable_shared_from_this<connection> {
 public:
  connection(net::io_context& context, load& all) : socket_(context), all_(all) {}

  void start(tcp::endpoint const& server) {
    socket_.connect(server);
    socket_.set_option(tcp::no_delay{true});
    send();
  }

 private:
  void send() {
    began_ = clock::now();
    if (began_ >= all_.end || !all_.failure.empty()) {
      return;
    }
    net::async_write(socket_, net::buffer(all_.request),
                     [self = shared_from_this()](auto failure, std::size_t) {
                       self->failed(failure) ? void() : self->receive();
                     });
  }

  void receive() {
    parser_.emplace();
    parser_->body_limit(boost::none);
    http::async_read(socket_, buffer_, *parser_,
                     [self = shared_from_this()](auto failure, std::size_t) {
                       self->failed(failure) ? void() : self->note();
                     });
  }

  void note() {
    auto const& answer = parser_->get();
    if (answer.result_int() != 200) {
      all_.failure = fmt::format("a request was answered {}: {}", answer.result_int(),
                                 std::string{answer.body().begin(), answer.body().end()});
      return;
    }
    auto const now = clock::now();
    if (began_ >= all_.counts_from) {
      all_.first_began = std::min(all_.first_began, began_);
      all_.last_answer = now;
      all_.took_us.push_back(std::chrono::duration<double, std::micro>{now - began_}.count());
    }
    send();
  }

  bool failed(boost::system::error_code const& failure) {
    if (failure) {
      all_.failure = failure.message();
    }
    return bool{failure};
  }

  tcp::socket socket_;
  load& all_;
  boost::beast::flat_buffer buffer_;
  std::optional<http::response_parser<http::vector_body<char>>> parser_;
  clock::time_point began_;
};

/// Nearest rank, of values in order.
double quantile(std::vector<double> const& sorted, double share) {
  auto const rank = static_cast<std::size_t>(share * static_cast<double>(sorted.size()));
  return sorted.at(std::min(rank, sorted.size() - 1));
}

int send_load(std::string const& file, unsigned short port, int connections, double seconds) {
  std::ifstream from{file, std::ios::binary};
  load all;
  all.request.assign(std::istreambuf_iterator<char>{from}, {});
  auto const length =
      std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>{seconds});
  all.counts_from = clock::now() + length / 10;
  all.end = all.counts_from + length;
  net::io_context context{1};
  for (int i = 0; i < connections; ++i) {
    std::make_shared<connection>(context, all)->start({net::ip::address_v4::loopback(), port});
  }
  context.run();
  if (!all.failure.empty() || all.took_us.empty()) {
    std::fprintf(stderr, "%s\n",
                 all.failure.empty() ? "nothing was answered in time" : all.failure.c_str());
    return 1;
  }
  auto& took = all.took_us;
  std::sort(took.begin(), took.end());
  std::printf(
      R"({"rate_per_s": %.3f, "latency_us": {"n": %zu, "p50": %.1f, "p90": %.1f, "p99": %.1f, "max": %.1f}})"
      "\n",
      static_cast<double>(took.size()) /
          std::chrono::duration<double>{all.last_answer - all.first_began}.count(),
      took.size(), quantile(took, 0.5), quantile(took, 0.9), quantile(took, 0.99), took.back());
  return 0;
}

void drop_requests_of(tcp::socket client, std::size_t bytes) {
  std::string const answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
  std::vector<char> piece(std::size_t{1} << 20U);
  boost::system::error_code failure;
  while (!failure) {
    for (auto left = bytes; left > 0 && !failure;) {
      left -= client.read_some(net::buffer(piece.data(), std::min(left, piece.size())), failure);
    }
    if (!failure) {
      net::write(client, net::buffer(answer), failure);
    }
  }
}

int drop_requests(std::size_t bytes) {
  net::io_context context{1};
  tcp::acceptor listens{context, {net::ip::address_v4::loopback(), 0}};
  std::printf("%d\n", listens.local_endpoint().port());
  std::fflush(stdout);
  for (;;) {
    auto client = listens.accept();
    client.set_option(tcp::no_delay{true});
    std::thread{drop_requests_of, std::move(client), bytes}.detach();
  }
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  std::string request;
  unsigned short port = 0;
  int connections = 1;
  double seconds = 1.0;
  std::size_t drop = 0;
  CLI::App app{"Loads an HTTP server, or drops what another one sends."};
  app.add_option("--request", request, "file with the bytes of one request, header and body");
  app.add_option("--port", port, "of a server on this machine");
  app.add_option("--connections", connections)->check(CLI::Range(1, 10'000));
  app.add_option("--seconds", seconds, "that count; a tenth of it more comes before")
      ->check(CLI::PositiveNumber);
  app.add_option("--drop", drop, "be a server: of requests with so many bytes");
  CLI11_PARSE(app, argc, argv);
  return drop > 0 ? sluice::bench::drop_requests(drop)
                  : sluice::bench::send_load(request, port, connections, seconds);
}
