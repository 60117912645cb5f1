#include "runtime/server/http/endpoint.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/http/connection.hpp"
#include "runtime/server/http/endpoint_security.hpp"
#include "runtime/server/http/listening.hpp"
#include "runtime/server/inference/background_thread.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

namespace net = boost::asio;
using net::ip::tcp;

namespace {

constexpr std::chrono::milliseconds accept_pause{50};
constexpr std::chrono::seconds look_interval{1};
// Keeps the deadline within the clock's range, whatever the caller means by "for ever".
constexpr std::chrono::milliseconds longest_grace{std::chrono::hours{24}};
// Connections for which no idle one can make room are told so, but not without a limit of their own.
constexpr std::size_t most_refusals = 64;

endpoint_options checked(endpoint_options options) {
  auto const require = [](bool holds, std::string_view message) {
    if (!holds) throw error{error_kind::invalid_argument, std::string{message}};
  };
  require(options.threads >= 1 && options.threads <= 256 && options.body_threads >= 1 &&
              options.body_threads <= 256,
          "the endpoint takes 1 to 256 threads of each kind");
  require(options.max_connections >= 1, "the endpoint needs at least one connection");
  require(options.max_body_bytes >= 1, "the endpoint's largest body must be at least one byte");
  require(options.max_header_bytes >= 512,
          "the endpoint's largest header must be at least 512 bytes");
  require(options.transfer_timeout.count() > 0 && options.idle_timeout.count() > 0 &&
              options.handshake_timeout.count() > 0,
          "the endpoint's timeouts must be longer than 0");
  return options;
}

/// What an endpoint for other machines lacks; empty: nothing.
std::string_view unprotected(endpoint_options const& options) {
  auto const state = options.security ? options.security->current() : nullptr;
  bool const has_tokens = state && state->tokens, has_tls = state && state->tls;
  if (has_tokens && has_tls) return "";
  if (has_tls) return "asks nobody who they are (server.token_file)";
  if (has_tokens) return "what is said can be read on the way, tokens too (server.tls)";
  return "asks nobody who they are (server.token_file), and what is said can be read on the way "
         "(server.tls)";
}

}  // namespace

class endpoint::impl {
  /// What one thread does alone: it serves the connections that were given to it.
  struct io_thread {
    net::io_context io{1};
    net::executor_work_guard<net::io_context::executor_type> work{io.get_executor()};
    std::shared_ptr<void const> connections = std::make_shared<int>();  ///< held by each
  };

  /// A socket of somebody else's, on the first of these threads.
  class watched_socket : public std::enable_shared_from_this<watched_socket> {
   public:
    watched_socket(net::io_context& io, int own_descriptor, socket_watcher::reader on_readable,
                   std::function<void()> on_end)
        : descriptor_(io, own_descriptor),
          on_readable_(std::move(on_readable)),
          on_end_(std::move(on_end)) {}

    void wait() {
      descriptor_.async_wait(
          net::posix::stream_descriptor::wait_read,
          [self = shared_from_this()](boost::system::error_code failure) {
            if (!failure && self->on_readable_(self->descriptor_.native_handle())) {
              return self->wait();
            }
            self->end();
          });
    }
    void end() {
      boost::system::error_code ignored;
      descriptor_.close(ignored);
      if (auto const on_end = std::exchange(on_end_, nullptr)) on_end();
    }

   private:
    net::posix::stream_descriptor descriptor_;
    socket_watcher::reader on_readable_;
    std::function<void()> on_end_;
  };

 public:
  impl(endpoint_options options, inference_service& service)
      : context_(checked(std::move(options)), service),
        ios_(context_.options.threads),
        bodies_(static_cast<int>(context_.options.body_threads)),
        changes_(1),
        acceptor_(listen(first(), address_of(context_.options.host, context_.options.port))),
        pause_(acceptor_.get_executor()),
        files_timer_(bodies_),
        local_(acceptor_.local_endpoint()),
        body_work_(bodies_.get_executor()),
        change_work_(changes_.get_executor()) {
    context_.bodies = bodies_.get_executor();
    context_.changes = changes_.get_executor();
    if (auto const missing = unprotected(context_.options);
        !missing.empty() && !local_.address().is_loopback()) {
      spdlog::warn("the endpoint can be reached from other machines and {} address={}", missing,
                   address_text(local_));
    }
    if (context_.options.security) look_at_files();
    net::post(acceptor_.get_executor(), [this] { accept(); });
    try {
      for (auto& each : ios_) {
        threads_.emplace_back([&io = each.io] {
          connection::io_of_this_thread = &io;
          run(io);
        });
      }
      for (unsigned i = 0; i < context_.options.body_threads; ++i) {
        threads_.emplace_back([this] {
          give_way();
          run(bodies_);
        });
      }
      threads_.emplace_back([this] { run(changes_); });
    } catch (...) {
      for (auto& each : ios_) each.io.stop();
      bodies_.stop();
      changes_.stop();
      end_threads();
      throw;
    }
  }

  ~impl() { stop(std::chrono::milliseconds{0}); }
  impl(impl const&) = delete;
  impl& operator=(impl const&) = delete;
  impl(impl&&) = delete;
  impl& operator=(impl&&) = delete;

  [[nodiscard]] tcp::endpoint const& local() const noexcept { return local_; }
  [[nodiscard]] std::size_t connections() const { return context_.registry.size(); }

  bool watch(int socket, socket_watcher::reader on_readable, std::function<void()> on_end) {
    std::lock_guard const lock{stopping_};
    auto own = memhandover::duplicate(socket);
    if (threads_.empty() || !own) return false;
    net::post(first(), [this, own = std::make_shared<memhandover::unique_fd>(std::move(own)),
                        on_readable = std::move(on_readable), on_end = std::move(on_end)] {
      auto const made =
          std::make_shared<watched_socket>(first(), own->release(), on_readable, on_end);
      std::erase_if(watched_, [](auto const& each) { return each.expired(); });
      watched_.push_back(made);
      made->wait();
    });
    return true;
  }

  void drain() {
    std::lock_guard const lock{stopping_};
    if (!threads_.empty()) begin_end();
  }

  void stop(std::chrono::milliseconds grace) {
    std::lock_guard const lock{stopping_};
    if (threads_.empty()) return;
    auto const deadline = std::chrono::steady_clock::now() + std::min(grace, longest_grace);
    begin_end();
    if (!context_.registry.wait_until_empty(deadline)) {
      auto const left = context_.registry.members();
      if (grace.count() > 0) {
        spdlog::warn("connections were cut at the end of the grace connections={}", left.size());
      }
      for (auto const& member : left) member->abort();
    }
    end_threads();
  }

 private:
  /// Under `stopping_`.
  void begin_end() {
    context_.registry.close();
    net::post(acceptor_.get_executor(), [this] {
      boost::system::error_code ignored;
      acceptor_.close(ignored);
      pause_.cancel();
    });
    for (auto const& member : context_.registry.members()) member->drain();
  }

  static void run(net::io_context& io) {
    while (true) {
      try {
        io.run();
        return;
      } catch (std::exception const& failure) {
        spdlog::error("a handler of the endpoint failed reason={}",
                      telemetry::quoted(failure.what()));
      }
    }
  }

  /// With the acceptor and all connections closed the threads run out of work by themselves.
  void end_threads() {
    net::post(first(), [this] {
      for (auto const& each : watched_) {
        if (auto const watched = each.lock()) watched->end();
      }
    });
    for (auto& each : ios_) each.work.reset();
    body_work_.reset();
    change_work_.reset();
    bodies_.stop();  // nobody waits for what is left in it
    changes_.stop();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    std::lock_guard const lock{context_.life->mutex};
    context_.life->alive = false;
  }

  /// On a thread that may wait for a disk.
  void look_at_files() {
    files_timer_.expires_after(look_interval);
    files_timer_.async_wait([this](boost::system::error_code cancelled) {
      if (cancelled) return;
      context_.options.security->reload_if_changed();
      look_at_files();
    });
  }

  void accept() {
    if (!acceptor_.is_open()) return;
    acceptor_.async_accept([this](boost::system::error_code failure, tcp::socket socket) {
      on_accepted(failure, std::move(socket));
    });
  }

  void on_accepted(boost::system::error_code failure, tcp::socket socket) {
    if (!acceptor_.is_open()) return;
    if (failure) {
      // Out of descriptors, or the client left before it was taken in: neither gets better by
      // trying at once.
      spdlog::warn("a connection could not be accepted reason={}",
                   telemetry::quoted(failure.message()));
      if (failure == net::error::no_descriptors) {
        if (auto const gives_way = context_.registry.take_longest_resting())
          gives_way->end_if_idle();
      }
      pause_.expires_after(accept_pause);
      pause_.async_wait([this](boost::system::error_code cancelled) {
        if (!cancelled) accept();
      });
      return;
    }
    try {
      take_in(std::move(socket));
    } catch (std::exception const& reason) {
      spdlog::error("a connection could not be taken in reason={}",
                    telemetry::quoted(reason.what()));
    }
    accept();
  }

  void take_in(tcp::socket socket) {
    auto const open = context_.registry.size();
    if (open >= context_.options.max_connections + most_refusals) return;
    auto const least = std::min_element(ios_.begin(), ios_.end(), [](auto const& a, auto const& b) {
      return a.connections.use_count() < b.connections.use_count();
    });
    if (least != ios_.begin()) {
      socket = tcp::socket{least->io, local_.protocol(), socket.release()};
    }
    auto const client =
        std::make_shared<connection>(std::move(socket), context_, least->connections);
    if (!context_.registry.add(client)) return;
    auto const gives_way = open < context_.options.max_connections
                               ? nullptr
                               : context_.registry.take_longest_resting();
    if (gives_way) gives_way->end_if_idle();
    if (open < context_.options.max_connections || gives_way) {
      client->start();
    } else {
      client->start_refused();
    }
  }

  [[nodiscard]] net::io_context& first() { return ios_.front().io; }

  endpoint_context context_;
  std::deque<io_thread> ios_;
  net::io_context bodies_;
  net::io_context changes_;                             // of models
  tcp::acceptor acceptor_;                              // on the first of these threads
  net::steady_timer pause_;                             // on the same
  std::vector<std::weak_ptr<watched_socket>> watched_;  // on the same
  net::steady_timer files_timer_;
  tcp::endpoint local_;
  net::executor_work_guard<net::io_context::executor_type> body_work_, change_work_;
  std::vector<std::thread> threads_;  // under stopping_
  std::mutex stopping_;
};

endpoint::endpoint(endpoint_options options, inference_service& service)
    : impl_(std::make_unique<impl>(std::move(options), service)) {}
endpoint::~endpoint() = default;

std::uint16_t endpoint::port() const noexcept {
  return impl_->local().port();
}
std::string endpoint::address() const {
  return address_text(impl_->local());
}
bool endpoint::watch(int socket, reader on_readable, std::function<void()> on_end) {
  return impl_->watch(socket, std::move(on_readable), std::move(on_end));
}
std::size_t endpoint::connections() const {
  return impl_->connections();
}
void endpoint::drain() {
  impl_->drain();
}
void endpoint::stop(std::chrono::milliseconds grace) {
  impl_->stop(grace);
}

}  // namespace sluice::server
