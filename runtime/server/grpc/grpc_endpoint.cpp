#include "runtime/server/grpc/grpc_endpoint.hpp"

#include <fmt/format.h>
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/steady_timer.hpp>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/grpc/grpc_context.hpp"
#include "runtime/server/grpc/grpc_listener.hpp"
#include "runtime/server/grpc/message_codec.hpp"
#include "runtime/server/grpc/rpc_call.hpp"
#include "runtime/server/http/listening.hpp"
#include "runtime/server/inference/background_thread.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

namespace net = boost::asio;

namespace {

constexpr std::chrono::seconds look_interval{1};
constexpr unsigned certificate_interval_s = 1;
constexpr int handshake_timeout_ms = 10'000;
// Whoever is asked whether it is there, and does not answer, has gone.
constexpr int keepalive_ms = 60'000, keepalive_timeout_ms = 20'000;
constexpr int most_streams_of_a_connection = 1024;
/// For what surrounds messages.
constexpr std::uint64_t quota_beside_messages = std::uint64_t{64} << 20U;
constexpr std::chrono::milliseconds longest_grace{std::chrono::hours{24}};

/// What gRPC says of itself; what matters of it becomes an error here anyway.
void log_of_grpc(gpr_log_func_args* line) {
  spdlog::debug("gRPC says text={}", telemetry::quoted(line->message));
}

/// As long as the process lives: the library's own end waits for its threads, one of which may poll for 10 s.
void keep_grpc() {
  static bool const is_kept = [] {
    ::gpr_set_log_function(log_of_grpc);
    silence_protobuf();
    ::grpc_init();
    return true;
  }();
  static_cast<void>(is_kept);
}

std::shared_ptr<grpc::ServerCredentials> credentials_of(grpc_options const& options) {
  if (options.certificate_file.empty()) return grpc::InsecureServerCredentials();
  namespace experimental = grpc::experimental;
  experimental::TlsServerCredentialsOptions tls{
      std::make_shared<experimental::FileWatcherCertificateProvider>(
          options.key_file.string(), options.certificate_file.string(), certificate_interval_s)};
  tls.watch_identity_key_cert_pairs();
  return experimental::TlsServerCredentials(tls);
}

}  // namespace

class grpc_endpoint::impl {
 public:
  impl(grpc_options options, inference_service& service)
      : context_(std::move(options), service),
        calls_(context_),
        answer_work_(context_.answers.get_executor()),
        body_work_(context_.bodies.get_executor()),
        timer_(context_.answers),
        listener_(context_.answers, context_.options.host, context_.options.port,
                  context_.options.max_connections) {
    start();
    look();
    try {
      for (unsigned i = 0; i < context_.options.threads; ++i) {
        threads_.emplace_back([this] { context_.answers.run(); });
        threads_.emplace_back([this] {
          give_way();
          context_.bodies.run();
        });
      }
    } catch (...) {
      context_.answers.stop();
      context_.bodies.stop();
      server_->Shutdown(std::chrono::system_clock::now());
      join();
      throw;
    }
    listener_.start([this](int connection) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters it;
      it.fd = connection;
      connections_->HandleNewConnection(&it);
    });
  }
  ~impl() { stop(std::chrono::milliseconds{0}); }
  impl(impl const&) = delete;
  impl& operator=(impl const&) = delete;
  impl(impl&&) = delete;
  impl& operator=(impl&&) = delete;

  [[nodiscard]] std::uint16_t port() const noexcept { return listener_.local().port(); }
  [[nodiscard]] std::string address() const { return address_text(listener_.local()); }
  [[nodiscard]] std::size_t calls() const { return context_.registry.size(); }

  void stop(std::chrono::milliseconds grace) {
    std::lock_guard const lock{stopping_};
    if (!server_) return;
    context_.registry.close();
    listener_.stop();
    for (auto const& each : context_.registry.members()) each->drain();
    server_->Shutdown(std::chrono::system_clock::now() + std::min(grace, longest_grace));
    server_.reset();
    context_.answers.stop();
    context_.bodies.stop();
    join();
    std::lock_guard const end{context_.life->mutex};
    context_.life->alive = false;
  }

 private:
  class generic_service final : public grpc::CallbackGenericService {
   public:
    explicit generic_service(grpc_context& context) : context_(context) {}

    grpc::ServerGenericBidiReactor* CreateReactor(
        grpc::GenericCallbackServerContext* asked) override {
      auto const call = std::make_shared<rpc_call>(*asked, context_);
      call->start();
      return call.get();
    }

   private:
    grpc_context& context_;
  };

  void join() {
    for (auto& each : threads_) each.join();
    threads_.clear();
  }

  void start() {
    auto const& options = context_.options;
    keep_grpc();
    auto const most = std::min(options.max_message_bytes, largest_message);
    grpc::ResourceQuota quota{"sluice"};
    quota.Resize(options.max_waiting_bytes + most + quota_beside_messages);
    grpc::ServerBuilder builder;
    builder.SetResourceQuota(quota);
    builder.SetMaxReceiveMessageSize(static_cast<int>(most));
    builder.SetMaxSendMessageSize(-1);
    builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, most_streams_of_a_connection);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                               static_cast<int>(options.idle_timeout.count()));
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, handshake_timeout_ms);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_ms);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_timeout_ms);
    connections_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        credentials_of(options));
    builder.RegisterCallbackGenericService(&calls_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) throw error{error_kind::internal, "gRPC's server does not start"};
  }

  void look() {
    timer_.expires_after(look_interval);
    timer_.async_wait([this](boost::system::error_code cancelled) {
      if (cancelled) return;
      auto const now = rpc_call::clock::now();
      for (auto const& each : context_.registry.members()) each->end_if_stalled(now);
      look();
    });
  }

  grpc_context context_;
  generic_service calls_;
  net::executor_work_guard<net::io_context::executor_type> answer_work_;
  net::executor_work_guard<net::io_context::executor_type> body_work_;
  net::steady_timer timer_;  // of the threads for answers
  grpc_listener listener_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> connections_;
  std::mutex stopping_;
  std::unique_ptr<grpc::Server> server_;  // under stopping_, once threads run
  std::vector<std::thread> threads_;
};

void grpc_endpoint::require() {}

grpc_endpoint::grpc_endpoint(grpc_options options, inference_service& service)
    : impl_(std::make_unique<impl>(std::move(options), service)) {}
grpc_endpoint::~grpc_endpoint() = default;

std::uint16_t grpc_endpoint::port() const noexcept {
  return impl_->port();
}
std::string grpc_endpoint::address() const {
  return impl_->address();
}
std::size_t grpc_endpoint::calls() const {
  return impl_->calls();
}
void grpc_endpoint::stop(std::chrono::milliseconds grace) {
  impl_->stop(grace);
}

}  // namespace sluice::server
