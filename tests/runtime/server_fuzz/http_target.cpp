// Bytes as a client sends them to a connection of the HTTP endpoint, which runs here on one thread and a pair of sockets.
//
// The first byte of an input says how the rest is delivered, the second where it is cut and what it is a body of:
//   bits 0, 1   whole; in two pieces; in many; whole, by a client that then leaves instead of finishing
//   bit 2       the service answers late: when the client has sent all
//   bits 3 to 5 the rest is what the client sends (0, 1, 2), or the body of a request with the right head: JSON, binary tensors behind
//               JSON, gzip, deflate, chunks

#include <sys/socket.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/http/connection.hpp"
#include "runtime/server/http/content_coding.hpp"
#include "runtime/server/http/endpoint_context.hpp"
#include "tests/runtime/server_fuzz/echo_service.hpp"
#include "tests/runtime/server_fuzz/fuzz_target.hpp"

namespace sluice::server::fuzzing {
namespace {

using nlohmann::json;

constexpr std::size_t longest_input = std::size_t{64} << 10U;  // fits into the sockets

struct delivery {
  explicit delivery(std::string_view input)
      : how(static_cast<unsigned char>(input[0])), where(static_cast<unsigned char>(input[1])) {}

  [[nodiscard]] bool leaves() const { return (how & 3U) == 3; }
  [[nodiscard]] bool is_late() const { return (how & 4U) != 0; }
  [[nodiscard]] unsigned form() const { return (how >> 3U) & 7U; }
  [[nodiscard]] std::size_t piece(std::size_t all) const {
    if ((how & 3U) == 1) return std::max<std::size_t>(1, all * where / 256);
    return (how & 3U) == 2 ? 1 + all / 16 + where % 16U : std::max<std::size_t>(1, all);
  }
  [[nodiscard]] std::string_view target() const {
    constexpr std::array<std::string_view, 4> targets{
        "/v2/models/all/infer", "/v2/models/all/versions/3/infer", "/v2/repository/index",
        "/v2/repository/models/all/load"};
    return targets.at(where % 8U < 5 ? 0 : where % 8U - 4);
  }

  unsigned char how, where;
};

std::string head_of(std::string_view target, std::string_view headers) {
  std::string head{"POST "};
  return head.append(target).append(" HTTP/1.1\r\nHost: h\r\n").append(headers).append("\r\n");
}

std::string with_length(std::string_view target, std::string headers, std::string_view body) {
  headers += "Content-Length: " + std::to_string(body.size()) + "\r\n";
  return head_of(target, headers).append(body);
}

std::string in_chunks(std::string_view target, std::string_view body, std::size_t most) {
  auto text = head_of(target, "Transfer-Encoding: chunked\r\n");
  std::array<char, 16> size{};
  for (; !body.empty(); body.remove_prefix(std::min(most, body.size()))) {
    auto const chunk = body.substr(0, most);
    text.append(size.data(), static_cast<std::size_t>(
                                 std::snprintf(size.data(), size.size(), "%zx\r\n", chunk.size())));
    text.append(chunk).append("\r\n");
  }
  return text.append("0\r\n\r\n");
}

/// What the client sends.
std::string sent_by(delivery const& by, std::string_view rest) {
  switch (by.form()) {
    case 3:
      return with_length(by.target(), "", rest);
    case 4: {
      auto const end = rest.find("]}]}");
      auto const length = end == std::string_view::npos ? rest.size() : end + 4;
      return with_length(
          by.target(), "Inference-Header-Content-Length: " + std::to_string(length) + "\r\n", rest);
    }
    case 5:
      return with_length(by.target(), "Content-Encoding: gzip\r\nAccept-Encoding: gzip\r\n",
                         compressed(rest, {}, content_coding::gzip));
    case 6:
      return with_length(by.target(), "Content-Encoding: deflate\r\nAccept-Encoding: deflate\r\n",
                         compressed(rest, {}, content_coding::deflate));
    case 7:
      return in_chunks(by.target(), rest, by.where + 16U);
    default:
      return std::string{rest};
  }
}

/// The answers that came are whole, but for the last where the client left or the connection ended in its middle.
void check_answers(std::string_view answers, std::string_view sent) {
  constexpr std::array known{100, 200, 400, 404, 405, 408, 413, 415, 417, 431, 501, 503, 505};
  bool const may_lack_bodies = sent.find("HEAD") != std::string_view::npos;
  while (!answers.empty()) {
    require(answers.starts_with("HTTP/1."), "an answer begins with its version", answers);
    auto const status = std::atoi(std::string{answers.substr(9, 3)}.c_str());
    require(std::find(known.begin(), known.end(), status) != known.end(),
            "the status is one of those known", answers);
    auto const end = answers.find("\r\n\r\n");
    require(end != std::string_view::npos, "a head ends", answers);
    auto const head = answers.substr(0, end + 2);
    answers.remove_prefix(end + 4);
    if (status == 100) continue;
    constexpr std::string_view length_name{"\r\nContent-Length: "};
    auto const at = head.find(length_name);
    require(at != std::string_view::npos, "an answer has a length", head);
    auto const length = std::strtoull(head.data() + at + length_name.size(), nullptr, 10);
    if (may_lack_bodies && (answers.empty() || answers.starts_with("HTTP/1."))) continue;
    require(length <= answers.size(), "an answer is whole", head);
    auto const body = answers.substr(0, length);
    answers.remove_prefix(length);
    if (head.find("Content-Encoding") != std::string_view::npos) continue;
    if (head.find("\r\nContent-Type: application/json") == std::string_view::npos) continue;
    require(json::accept(body), "an answer is JSON", body);
    if (status >= 400) {
      auto const said = json::parse(body);
      require(
          said.is_object() && said.contains("error") && !said["error"].get<std::string>().empty(),
          "a failure says why", body);
    }
  }
}

/// One endpoint, without its threads and its port.
class front {
 public:
  front() : context_(options(), service_) {
    context_.bodies = context_.changes = io_.get_executor();
    connection::io_of_this_thread = &io_;
  }

  void serve(delivery const& by, std::string const& sent) {
    std::array<int, 2> ends{};
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0,
            "there is a pair of sockets");
    memhandover::unique_fd client{ends[0]};
    boost::asio::ip::tcp::socket socket{io_, boost::asio::ip::tcp::v4(), ends[1]};
    service_.set_late(by.is_late());
    std::string answers;
    {
      auto const made = std::make_shared<connection>(std::move(socket), context_, nullptr);
      require(context_.registry.add(made), "the connection is taken in");
      made->start();
    }
    std::string_view rest{sent};
    auto const piece = by.piece(rest.size());
    while (!rest.empty()) {
      auto const count =
          ::send(client.get(), rest.data(), std::min(piece, rest.size()), MSG_NOSIGNAL);
      if (count > 0) rest.remove_prefix(static_cast<std::size_t>(count));
      bool const moved = run(client.get(), answers);
      if (count < 0 && !moved) break;  // it reads no more of a connection that it ends
    }
    if (by.leaves()) {
      client.reset();
    } else {
      ::shutdown(client.get(), SHUT_WR);
    }
    run(client.get(), answers);
    while (service_.answer_waiting()) run(client.get(), answers);
    require(context_.registry.size() == 0, "a connection ends with its client", sent);
    require(context_.waiting_body_bytes == 0, "no body is left", sent);
    if (!by.leaves()) check_answers(answers, sent);
  }

 private:
  static endpoint_options options() {
    endpoint_options made;
    made.max_body_bytes = std::uint64_t{192} << 10U;  // two of which may come at once
    made.max_waiting_body_bytes = std::uint64_t{256} << 10U;
    return made;
  }

  /// Until nothing moves any more; whether something has.
  bool run(int client, std::string& answers) {
    bool moved = false;
    for (bool again = true; again; moved |= again) {
      io_.restart();
      again = io_.poll() > 0;
      for (ssize_t got = 0;
           client >= 0 && (got = ::recv(client, bytes_.data(), bytes_.size(), 0)) > 0;) {
        answers.append(bytes_.data(), static_cast<std::size_t>(got));
        again = true;
      }
    }
    return moved;
  }

  boost::asio::io_context io_{1};
  echo_service service_;
  endpoint_context context_;
  std::array<char, 65536> bytes_{};  // that came last
};

json tensor_json(std::string_view name, std::string_view type, json shape, json data) {
  return {
      {"name", name}, {"datatype", type}, {"shape", std::move(shape)}, {"data", std::move(data)}};
}

json request_json() {
  return {{"id", "7"},
          {"parameters", {{"timeout", 5000}, {"priority", 1}}},
          {"inputs",
           {tensor_json("f", "FP32", {2, 2}, {{1, 2.5}, {-0.3, "NaN"}}),
            tensor_json("i", "INT64", {2}, {INT64_MIN, 9007199254740993}),
            tensor_json("s", "BYTES", {2}, {"", "\u00e9\"x"}),
            tensor_json("h", "FP16", {2}, {0.1, 65504}), tensor_json("o", "BOOL", {1}, {true})}},
          {"outputs", {{{"name", "f"}}, {{"name", "s"}, {"parameters", {{"binary_data", true}}}}}}};
}

std::string binary_request() {
  json asked{{"parameters", {{"binary_data_output", true}}}};
  auto const add = [&](char const* name, char const* type, json shape, int bytes) {
    asked["inputs"].push_back({{"datatype", type},
                               {"name", name},
                               {"parameters", {{"binary_data_size", bytes}}},
                               {"shape", std::move(shape)}});
  };
  add("f", "FP32", {1, 2}, 8);
  add("i", "INT64", {1}, 8);
  add("s", "BYTES", {2}, 10);
  add("h", "FP16", {2}, 4);
  add("o", "BOOL", {2}, 2);
  return asked.dump() + std::string{"12345678abcdefgh\1\0\0\0x\1\0\0\0yhhhh\0\1", 32};
}

}  // namespace

std::vector<std::string> seeds() {
  std::vector<std::string> made;
  auto const add = [&](unsigned how, unsigned where, std::string const& rest) {
    made.push_back(std::string{static_cast<char>(how), static_cast<char>(where)} + rest);
  };
  auto const text = request_json().dump();
  for (unsigned form = 3; form < 8; ++form) {
    for (unsigned how = 0; how < 8; ++how) add(form << 3U | how, 9 * how, text);
    add(form << 3U, 0, binary_request());
  }
  add(3U << 3U, 6, R"({"ready": true})");
  add(3U << 3U, 7, R"({"parameters": {}})");
  for (auto const* const path :
       {"/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/all",
        "/v2/models/all/versions/1/ready", "/v2/models/raises/ready", "/v2/models/none",
        "/v2/models/all/config", "/v2/models/stats", "/v2/models/a%2Fb%C3%A9/stats", "/v2/logging",
        "/v2/trace/setting", "/v2/models/all/trace/setting", "/v2/sluice/status", "/metrics",
        "/v2/systemsharedmemory/status", "http://h/v2?x=%zz#y"}) {
    add(0, 0, "GET " + std::string{path} + " HTTP/1.1\r\nHost: h\r\n\r\n");
    add(2, 0, "HEAD " + std::string{path} + " HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  }
  auto const ask = with_length("/v2/models/all/infer", "", text);
  add(0, 0, ask + ask + "GET /v2 HTTP/1.1\r\n\r\n" + ask);
  add(4, 0, ask + ask);
  add(2, 0, with_length("/v2/models/raises/infer", "Connection: close\r\n", text));
  add(0, 0, with_length("/v2/models/all/infer", "Expect: 100-continue\r\n", text));
  add(1, 99, with_length("/v2/models/all/infer", "Expect: 100-continue\r\n", text));
  add(0, 0,
      with_length("/v2/logging", "Content-Type: application/json\r\n",
                  R"({"log_verbose_level": 0})"));
  add(0, 0, with_length("/v2/trace/setting", "", R"({"trace_level": ["OFF"]})"));
  auto const gzip = compressed(text, {}, content_coding::gzip);
  add(0, 0,
      with_length("/v2/models/all/infer", "Content-Encoding: gzip\r\nTE: trailers\r\n", gzip));
  add(0, 0,
      with_length("/v2/models/all/infer", "Content-Encoding: deflate\r\n",
                  compressed(text, {}, content_coding::deflate)));
  add(0, 0,
      with_length("/v2/models/all/infer", "Content-Encoding: gzip\r\n",
                  compressed(std::string(std::size_t{180} << 10U, ' '), {}, content_coding::gzip)));
  add(0, 0,
      with_length("/v2/models/all/infer", "Inference-Header-Content-Length: 20\r\n",
                  binary_request()));
  add(0, 0, in_chunks("/v2/models/all/infer", text, 40));
  add(0, 0, "POST /v2/models/all/infer HTTP/1.1\r\nContent-Length: 250000\r\n\r\n{}");
  add(0, 0, "POST /v2/models/all/infer HTTP/1.1\r\nContent-Length: 150000\r\n\r\n{}");
  add(0, 0, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  add(0, 0, std::string{"\x16\x03\x01\x02\0\1\0\1\xFC\3\3", 11});
  add(0, 0, "GET / HTTP/1.1\r\nX: " + std::string(17'000, 'x') + "\r\n\r\n");
  return made;
}

void run_one(std::string_view input) {
  if (input.size() < 2) return;
  static front one;
  delivery const by{input};
  one.serve(by, sent_by(by, input.substr(2, longest_input)));
}

}  // namespace sluice::server::fuzzing
