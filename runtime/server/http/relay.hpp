/// One request of a client that an engine answers: has the engine admit it, and passes bytes between both as they come.
/// Inside of connection.hpp, which reads the request's head and goes on with the connection afterwards.
///
/// States:
///
///   waiting → connecting → asking → answering → ended
///                                 → tunnel ────┘         both have changed to a websocket
///   any → ended                                           refused, broken off, cancelled
///
/// Each way has one piece on its way at a time: what has been read is written before more is read, so that a slow reader slows the
/// other side's writer, and no more than some 100 KiB lie here. Both ways go on beside each other. The client is read ahead
/// meanwhile, up to `most_ahead`, so that its leaving is seen: then the engine's connection is closed.
///
/// A connection to the engine serves one request after the other, if it may (`keeps_connection`). One that is used again may have been
/// closed by the engine while the request was on its way: such a request is sent once more, on a new connection, if nothing of an
/// answer has come, all that was sent is still here, and it may be repeated (RFC 9110 section 9.2.2): because its method is
/// idempotent, or because nothing of it has come to the engine.
///
/// An engine that breaks off before its answer has begun is answered for (502, 503, 504); afterwards the client's connection is cut,
/// which tells it that the answer is not whole. Who reads server-sent events of OpenAI's APIs is told why by one more event before.
///
/// Of a request whose body names its engine, an answer in server-sent events is looked at while it passes: when its tokens come.
///
/// Threads: on the connection's alone, but for `admitted`, which is posted to it.
#pragma once

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "runtime/server/http/api.hpp"
#include "runtime/server/http/body_share.hpp"
#include "runtime/server/http/client_stream.hpp"
#include "runtime/server/http/named_body.hpp"
#include "runtime/server/http/passing_body.hpp"
#include "runtime/server/http/relay_headers.hpp"
#include "runtime/server/http/token_events.hpp"
#include "runtime/server/inference/engine_gateway.hpp"

namespace sluice::server {

struct endpoint_life;

/// How a relayed request has ended, for its connection.
struct relay_end {
  enum class next { keep_alive, close, cut };
  next then = next::cut;
  std::optional<http_reply> refusal{};  ///< nothing has been written: this is to be
  unsigned status = 0;                  ///< of the engine's answer; 0: none
  std::string_view cause{};             ///< one word, for logs; empty: it did not fail
  std::uint64_t bytes_in = 0, bytes_out = 0;
};

/// Of a request whose body names its engine.
struct begun_body {
  std::string bytes{};                ///< what has been read of it
  body_share share{};                 ///< that they have of all that wait
  std::optional<named_body> named{};  ///< reads the rest as well
};

class relay : public std::enable_shared_from_this<relay> {
 public:
  using request_parser = boost::beast::http::request_parser<passing_body>;

  struct parts {
    std::shared_ptr<void const> owner;  ///< keeps `client` and `ahead`
    client_stream& client;
    boost::beast::flat_buffer&
        ahead;  ///< what has been read of the client and belongs to nobody yet
    engine_gateway& gateway;
    std::shared_ptr<endpoint_life> life;
    std::size_t engine = 0;
    relayed_client from;
    bool expects_continue = false;
    bool may_keep_alive = false;
    std::chrono::milliseconds transfer_timeout{};
    std::chrono::steady_clock::time_point arrival = std::chrono::steady_clock::now();
    begun_body begun{};
    std::function<void(relay_end)> done;  ///< called once, unless it is cancelled
  };

  /// `parser` has read a head, and of the body what `begun` has.
  relay(parts given, std::unique_ptr<request_parser> parser);

  void start();
  /// The connection has been closed.
  void cancel();

 private:
  enum class state_t { waiting, connecting, asking, answering, tunnel, ended };
  using error_code = boost::system::error_code;
  using clock = std::chrono::steady_clock;
  using stream_socket = boost::asio::generic::stream_protocol::socket;
  using answer_parser = boost::beast::http::response_parser<passing_body>;

  /// A completion handler that does nothing once the relay has ended, and lets no exception out.
  template <typename... Args>
  auto on(void (relay::*step)(Args...));

  void on_admission(engine_admission admission);
  [[nodiscard]] bool take_over(engine_connection kept);
  void connect();
  void on_connected(error_code failure);
  void ask();

  // ---- from the client to the engine
  void read_client();
  void on_client_read(error_code failure, std::size_t bytes);
  void pass_request();
  [[nodiscard]] bool take_body();
  void take_parts_of_body();
  void refuse_body(unsigned status, std::string_view why);
  void take_tunnel();
  void on_request_passed(error_code failure, std::size_t bytes);

  // ---- from the engine to the client
  void read_engine();
  void on_engine_read(error_code failure, std::size_t bytes);
  void on_engine_end(error_code failure);
  [[nodiscard]] bool may_ask_again(error_code failure);
  void ask_again();
  void pass_answer();
  [[nodiscard]] bool take_head();
  void begin_answer();
  void take_answer();
  void on_answer_passed(error_code failure, std::size_t bytes);

  // ---- the end
  void refuse(unsigned status, std::string_view message, relay_outcome outcome);
  void break_off(relay_outcome outcome, std::string_view cause);
  void fail(std::string_view cause, std::string_view why);
  void on_failure_sent(error_code failure, std::size_t bytes);
  void finish(relay_end::next then);
  void note_tokens(std::size_t events);
  void report_tokens();
  [[nodiscard]] bool keeps_connection() const;
  void end(relay_end how, relay_outcome outcome);
  void give_end();
  void leave(relay_outcome outcome);
  void set_timer();
  void on_timer();
  [[nodiscard]] clock::time_point next_limit() const;

  parts with_;
  std::unique_ptr<request_parser> const parser_;
  request_parser& request_;
  boost::beast::http::request_header<> head_;
  unsigned const version_;
  body_framing request_framing_, answer_framing_;
  engine_limits const limits_;
  clock::time_point const arrival_;
  bool const may_be_followed_;  ///< the request, on the engine's connection
  state_t state_ = state_t::waiting;
  engine_ticket ticket_ = 0;
  engine_address address_;
  stream_socket engine_;
  std::uint64_t run_ = 0;  ///< of the engine, to which the connection belongs
  // Of a connection that has served a request before:
  bool is_used_ = false;
  bool has_heard_ = false;           ///< something has come on it
  bool has_sent_ = false;            ///< something has gone
  std::optional<std::string> sent_;  ///< all that has gone, as long as it is little
  std::optional<std::uint64_t> acknowledged_before_;
  // Of one on which the request is sent once more:
  bool asks_again_ = false, may_have_come_ = false;
  boost::asio::steady_timer timer_;
  boost::beast::flat_buffer engine_buffer_;
  std::optional<answer_parser> answer_;
  std::string client_piece_;           ///< what is being read
  std::string to_engine_, to_client_;  ///< what is being written
  bool client_reads_ = false, engine_writes_ = false, client_writes_ = false;
  bool client_has_finished_ = false;  ///< sending
  bool has_passed_request_ = false;   ///< its last byte has been given to the engine
  bool is_deaf_ = false;              ///< the engine takes no more of the request
  bool answers_early_ = false;        ///< before the whole request has come to it
  bool answer_is_over_ = false;       ///< its last byte is in `to_client_`, or before
  bool keep_alive_ = false;
  bool engine_has_left_ = false;            ///< before its answer was over
  std::string_view failed_for_{};           ///< the client is being told that it breaks off
  clock::time_point moved_ = clock::now();  ///< when something was passed last
  clock::time_point client_written_since_{};
  std::optional<clock::duration> until_answer_;
  // Of an answer in events that bring tokens:
  std::optional<token_events> events_;
  std::optional<clock::time_point> last_token_;
  token_times tokens_;  ///< not reported yet
  clock::time_point reported_{};
  unsigned status_ = 0;
  std::uint64_t bytes_in_ = 0, bytes_out_ = 0;
  std::optional<relay_end> end_;  ///< waits for the client's read to end
};

}  // namespace sluice::server
