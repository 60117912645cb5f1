/// One call of a client's: reads its requests, has them answered, writes the answers in the order of the requests. Inside of
/// grpc_endpoint.hpp. A call that is no stream has one request.
///
/// States:
///
///   reading ⇄ answering …   a stream reads on while answers are due, but for `most_in_flight`
///   any → finished → gone   after the last answer, a failure of the call itself, a cancellation; gRPC lets go of it then
///
/// A request is handed to the service before the next one is read, so that they arrive there in their order. What is small is read at
/// once, by the thread of gRPC's that brings it, the rest by threads for that.
///
/// Threads: gRPC's reactions, the service's answers and the endpoint's members come on any thread; what they share is under `mutex_`.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/support/byte_buffer.h>

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/server/grpc/calls.hpp"
#include "runtime/server/grpc/grpc_context.hpp"
#include "runtime/server/grpc/message_codec.hpp"
#include "runtime/server/http/access_log.hpp"
#include "runtime/server/http/body_share.hpp"

namespace sluice::server {

class rpc_call final : public grpc::ServerGenericBidiReactor,
                       public std::enable_shared_from_this<rpc_call> {
 public:
  using clock = std::chrono::steady_clock;
  /// Requests of a stream whose answers have not been sent; beyond, it is not read on.
  static constexpr std::size_t most_in_flight = 64;

  rpc_call(grpc::GenericCallbackServerContext& asked, grpc_context& context);

  /// To be called once, before gRPC gets it.
  void start();
  /// The registry has been closed: what is due is answered, and then a stream ends.
  void drain();
  /// Refuses it, if it is no stream and its message has not come since long before `now`.
  void end_if_stalled(clock::time_point now);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  /// A request, and what has become of it.
  struct exchange {
    access_entry entry;
    request_ticket ticket = 0;  ///< 0: nothing to cancel
    body_share share;
    std::string id{};                   ///< what it calls itself
    grpc::ByteBuffer message;           ///< of its answer
    std::optional<call_reply> refusal;  ///< in its place, of a call that is no stream
    bool is_answered = false;
  };
  using exchange_ptr = std::shared_ptr<exchange>;

  [[nodiscard]] std::optional<call_reply> refuse();
  [[nodiscard]] exchange_ptr new_exchange() const;
  /// Reads a message, and hands its request to the service; reads on afterwards.
  void handle(exchange_ptr const& one, grpc::ByteBuffer& message);
  void handled(exchange_ptr const& one);
  void infer(exchange_ptr const& one, grpc::ByteBuffer& message);
  [[nodiscard]] call_reply too_large() const;
  void on_result(exchange_ptr const& one, infer_result const& result);
  void answer(exchange_ptr const& one, call_reply reply);
  void answer(exchange_ptr const& one, message_pieces const& pieces);

  // With mutex_ held:
  void read_on();
  void write_on();
  void finish(grpc::Status const& status);
  void fail(call_reply const& reply);
  void log(access_entry& entry, std::string_view cause = {}) const;

  grpc::GenericCallbackServerContext& asked_;
  grpc_context& context_;
  std::string const name_;  ///< of the call, without its service
  bool const is_stream_;
  std::chrono::system_clock::time_point const deadline_;
  clock::time_point const begin_ = clock::now();
  std::shared_ptr<rpc_call> self_;  ///< until gRPC lets go of it
  grpc::ByteBuffer incoming_;       ///< gRPC's while it reads

  std::mutex mutex_;  ///< guards what follows
  std::deque<exchange_ptr> exchanges_;
  bool reading_ = false, handling_ = false, writing_ = false;
  bool is_at_end_ = false;  ///< the client has sent all
  bool is_finished_ = false;
};

}  // namespace sluice::server
