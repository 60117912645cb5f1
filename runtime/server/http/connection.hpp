/// One client's connection: reads requests, has them answered, writes the answers, one after the
/// other. Inside of endpoint.hpp, which accepts and ends connections.
///
/// States:
///
///   idle → reading → (waiting →) writing → idle …   a keep-alive connection, request after request;
///                                                   under TLS a handshake is read first
///          reading → (searching →) relaying → idle …  a request that an engine answers (relay.hpp), for which its body has to be
///                                                   read where that names the engine
///   writing → lingering → closed                    after an answer that ends the connection
///   any → closed                                    client gone, time out, abort
///
/// Requests that a client sends ahead (pipelining) stay in the buffer until their turn. While a request waits
/// for the service, the client is watched: if it leaves, its request is cancelled. One that has only
/// finished sending is told apart from one that has gone by an interim answer, which HTTP/1.1 lets a server send
/// at any time, and to which the machine of one that has gone answers with a reset.
///
/// Large bodies are read, and large answers made, by threads of their own, and in pieces, so that they take turns; what is small is
/// done at once.
///
/// Threads: but for that everything runs on the one thread of the socket's io_context; `start`, `drain`, `abort` and the service's
/// `done` may be called from anywhere and post to it, but for a `done` on that thread, which goes on at once.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/server/http/api.hpp"
#include "runtime/server/http/client_stream.hpp"
#include "runtime/server/http/endpoint_context.hpp"
#include "runtime/server/http/model_search.hpp"
#include "runtime/server/http/openai_form.hpp"
#include "runtime/server/http/relay.hpp"
#include "runtime/server/http/request_record.hpp"

namespace sluice::server {

class connection : public std::enable_shared_from_this<connection> {
 public:
  /// Set by threads that run one.
  static inline thread_local boost::asio::io_context* io_of_this_thread = nullptr;

  /// The socket's executor must be an io_context that one thread runs. `held` lives as long as the connection.
  connection(boost::asio::ip::tcp::socket socket, endpoint_context& context,
             std::shared_ptr<void const> held);

  void start();
  /// Answers 503 whatever comes: there are too many connections.
  void start_refused();
  /// The registry has been closed: finishes the request that is being received or answered, then closes.
  void drain();
  /// Another connection takes its place, unless it has a request meanwhile.
  void end_if_idle();
  void abort();

 private:
  enum class state_t { idle, reading, searching, waiting, relaying, writing, lingering, closed };
  using error_code = boost::system::error_code;
  using parser_type = boost::beast::http::request_parser<boost::beast::http::string_body>;

  /// A completion handler that keeps the connection alive, does nothing once it is closed, and lets
  /// no exception out.
  template <typename... Args>
  auto on(void (connection::*step)(Args...));
  template <typename Step>
  void post(Step step);

  [[nodiscard]] std::shared_ptr<tls_context> tls() const;
  void await_handshake();
  void on_hello(error_code failure, std::size_t bytes);
  void on_handshake(error_code failure, std::size_t bytes);
  void refuse_connection();
  void await_request();
  void on_first_bytes(error_code failure, std::size_t bytes);
  void read_header();
  void on_header(error_code failure, std::size_t bytes);
  void on_continue_written(error_code failure, std::size_t bytes);
  void read_body();
  void on_body(error_code failure, std::size_t bytes);
  void read_part();
  void on_part(error_code failure, std::size_t bytes);
  void read_large_body();
  /// What has come, where large bodies are read.
  [[nodiscard]] error_code take_what_is_there();
  void on_taken(error_code failure);
  void wake_for_rest();
  void on_more(error_code failure);
  [[nodiscard]] bool announces_large_body() const;
  /// Whether what has come of a large body finds no room, which is answered then.
  [[nodiscard]] bool refuse_share();
  /// A large body takes its share of what may wait, of what has come; the refusal if there is none left.
  [[nodiscard]] std::optional<http_reply> take_share(std::uint64_t body_bytes);
  /// Who answers the request whose head has come; nothing: this server does. With a refusal if it may not pass.
  [[nodiscard]] std::optional<engine_route> find_engine(std::optional<http_reply>& refusal) const;
  void pass_to_engine(engine_route where);
  void answer_of_models(openai_resource const& what);
  [[nodiscard]] std::optional<http_reply> refuse_named(openai_resource const& what) const;
  void search_engine();
  void on_searched(error_code failure, std::size_t bytes);
  void relay_request(std::size_t engine, std::unique_ptr<relay::request_parser> parser,
                     begun_body begun);
  void on_relayed(relay_end end);
  void answer_request();
  /// Has what takes long computed on a thread for that.
  template <typename Work>
  void compute(Work work, boost::asio::any_io_executor const& where);
  void on_outcome(oip_api::outcome of);
  /// On the connection's thread, or where a large body is computed.
  request_ticket infer(infer_request request);
  void on_submitted(request_ticket ticket, output_form form, request_label label);
  void on_result_here(std::uint64_t sequence, infer_result result);
  void on_result(std::uint64_t sequence, infer_result result);
  void on_answer(http_reply answer);

  /// Looks whether the client of a waiting request leaves.
  void watch();
  void on_watched(error_code failure, std::size_t bytes);
  void on_finished_sending();
  void on_reset(error_code failure);
  /// False: an answer has come meanwhile, and is being written.
  [[nodiscard]] bool watch_goes_on();
  void respond(http_reply answer, bool keep_alive);
  void on_written(error_code failure, std::size_t bytes);
  void linger();
  void on_shutdown(error_code failure);
  void on_lingered(error_code failure, std::size_t bytes);
  void close();

  /// Answers a request that could not be read, or closes if the client is gone.
  void read_failed(error_code failure);
  [[nodiscard]] std::optional<http_reply> refuse_stranger() const;
  [[nodiscard]] http_request view() const;

  void arm(std::chrono::milliseconds limit);
  void disarm() { limit_ = std::chrono::steady_clock::time_point::max(); }
  void set_timer();
  void on_timer();

  endpoint_context& context_;
  request_record record_;
  client_stream stream_;
  bool is_refused_ = false;
  boost::asio::io_context* const io_;
  std::shared_ptr<void const> const held_with_it_;
  /// Looks at `limit_`, which changes with each step. It is due no later, and mostly sooner.
  boost::asio::steady_timer timer_;
  std::chrono::steady_clock::time_point limit_ = std::chrono::steady_clock::time_point::max();
  bool timer_set_ = false;
  std::uint64_t timer_round_ = 0;  ///< tells a timer that fired too late that it is not meant
  bool timed_out_ = false;
  /// Another thread reads: then `stream_`, `buffer_` and `parser_` are its own, and the socket stays open until it has done.
  bool is_read_elsewhere_ = false;
  boost::beast::flat_buffer buffer_;
  std::optional<parser_type> parser_;
  std::shared_ptr<std::string> body_;  ///< which tensors of the request may keep as well
  state_t state_ = state_t::idle;
  std::uint64_t sequence_ = 0;  ///< of the request; a result for another one comes too late
  bool keep_alive_ = false;     ///< of the answer being written
  request_ticket ticket_ = 0;   ///< of the request that waits for the service; 0: none
  output_form form_;            ///< of its answer
  std::string id_;              ///< what it calls itself
  bool has_result_ = false;
  bool submitting_ = false;            ///< elsewhere; what comes before that is done is kept
  std::optional<infer_result> early_;  ///< of that
  body_share share_;
  std::chrono::steady_clock::time_point arrival_;
  bool watched_ = false;
  bool reads_ahead_ = false;    ///< of that, it is a read that goes on while the answer is written
  bool speaks_openai_ = false;  ///< refusals are in the form that OpenAI's clients read
  std::optional<model_search> search_;
  std::shared_ptr<relay> relay_;
  std::optional<http_reply> held_;  ///< an answer that waits for the end of the watch
};

}  // namespace sluice::server
