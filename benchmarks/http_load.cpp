// Loads an HTTP server from one thread: so many connections, each of which sends the same request again as soon as it has the
// answer to the last one; or with --rate, requests that arrive by a Poisson process, the same one each time, go to whichever connection
// is free, and a latency counts from the arrival. Prints how many were answered and how long each took, as JSON. With --drop it is a server itself,
// which only receives so many bytes of each request and answers with a few: what a bare loop over a socket can do.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/vector_body.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
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
  std::uint64_t seed = 1;                 ///< of arrivals
  double rate_per_s = 0.0;                ///< 0: connections send as soon as they can
  std::deque<clock::time_point> waiting;  ///< arrivals for which no connection was free
  std::vector<std::shared_ptr<class connection>> free;
};

class connection : public std::enable_shared_from_this<connection> {
 public:
  connection(net::io_context& context, load& all) : socket_(context), all_(all) {}

  void start(tcp::endpoint const& server) {
    socket_.connect(server);
    socket_.set_option(tcp::no_delay{true});
    be_free();
  }

  /// One that has arrived then.
  void send(clock::time_point arrival) {
    began_ = arrival;
    if (!all_.failure.empty()) {
      return;
    }
    net::async_write(socket_, net::buffer(all_.request),
                     [self = shared_from_this()](auto failure, std::size_t) {
                       self->failed(failure) ? void() : self->receive();
                     });
  }

 private:
  void be_free() {
    if (all_.rate_per_s == 0.0) {
      if (auto const now = clock::now(); now < all_.end) {
        send(now);
      }
    } else if (!all_.waiting.empty()) {
      auto const arrival = all_.waiting.front();
      all_.waiting.pop_front();
      send(arrival);
    } else {
      all_.free.push_back(shared_from_this());
    }
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
    be_free();
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

class arrivals {
 public:
  arrivals(net::io_context& context, load& all)
      : timer_(context), all_(all), dice_(all.seed), gap_(all.rate_per_s), next_(clock::now()) {}

  void await_next() {
    next_ +=
        std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>{gap_(dice_)});
    if (next_ >= all_.end || !all_.failure.empty()) {
      all_.free.clear();
      return;
    }
    timer_.expires_at(next_);
    timer_.async_wait([this](auto) {
      if (all_.free.empty()) {
        all_.waiting.push_back(next_);
      } else {
        auto const its = std::move(all_.free.back());
        all_.free.pop_back();
        its->send(next_);
      }
      await_next();
    });
  }

 private:
  net::steady_timer timer_;
  load& all_;
  std::mt19937_64 dice_;
  std::exponential_distribution<double> gap_;
  clock::time_point next_;
};

/// Nearest rank, of values in order.
double quantile(std::vector<double> const& sorted, double share) {
  auto const rank = static_cast<std::size_t>(share * static_cast<double>(sorted.size()));
  return sorted.at(std::min(rank, sorted.size() - 1));
}

int send_load(std::string const& file, unsigned short port, int connections, double seconds,
              double rate_per_s) {
  std::ifstream from{file, std::ios::binary};
  load all;
  all.rate_per_s = rate_per_s;
  all.request.assign(std::istreambuf_iterator<char>{from}, {});
  auto const length =
      std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>{seconds});
  all.counts_from = clock::now() + length / 10;
  all.end = all.counts_from + length;
  net::io_context context{1};
  for (int i = 0; i < connections; ++i) {
    std::make_shared<connection>(context, all)->start({net::ip::address_v4::loopback(), port});
  }
  arrivals coming{context, all};
  if (rate_per_s > 0.0) {
    coming.await_next();
  }
  context.run();
  all.free.clear();  // before what their sockets belong to goes
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
  double rate = 0.0;
  std::size_t drop = 0;
  CLI::App app{"Loads an HTTP server, or drops what another one sends."};
  app.add_option("--request", request, "file with the bytes of one request, header and body");
  app.add_option("--port", port, "of a server on this machine");
  app.add_option("--connections", connections)->check(CLI::Range(1, 10'000));
  app.add_option("--seconds", seconds, "that count; a tenth of it more comes before")
      ->check(CLI::PositiveNumber);
  app.add_option("--rate", rate, "requests that arrive each second, instead of as many as can be")
      ->check(CLI::PositiveNumber);
  app.add_option("--drop", drop, "be a server: of requests with so many bytes");
  CLI11_PARSE(app, argc, argv);
  return drop > 0 ? sluice::bench::drop_requests(drop)
                  : sluice::bench::send_load(request, port, connections, seconds, rate);
}
