#include "runtime/cli/pool_and_server.hpp"

#include <fmt/format.h>
#include <sys/un.h>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <exception>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/broker/runtime_folder.hpp"

namespace sluice::cli {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using nlohmann::json;

/// Host and port of "host:port" or "[address]:port".
std::pair<std::string, std::string> split(std::string const& endpoint) {
  auto const colon = endpoint.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == endpoint.size()) {
    throw error{
        error_kind::unavailable,
        fmt::format("the server gives the endpoint \"{}\", which is not host:port", endpoint)};
  }
  auto host = endpoint.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  return {host, endpoint.substr(colon + 1)};
}

// By value: a coroutine outlives references to its caller's temporaries.
asio::awaitable<std::string> fetch(std::string endpoint, std::string target,
                                   std::chrono::milliseconds patience) {
  auto const [host, port] = split(endpoint);
  auto const executor = co_await asio::this_coro::executor;
  asio::ip::tcp::resolver resolver{executor};
  beast::tcp_stream stream{executor};
  auto const addresses = co_await resolver.async_resolve(host, port, asio::use_awaitable);
  stream.expires_after(patience);
  co_await stream.async_connect(addresses, asio::use_awaitable);
  http::request<http::empty_body> request{http::verb::get, target, 11};
  request.set(http::field::host, endpoint);
  request.set(http::field::accept, "application/json");
  co_await http::async_write(stream, request, asio::use_awaitable);
  beast::flat_buffer buffer;
  http::response<http::string_body> response;
  co_await http::async_read(stream, buffer, response, asio::use_awaitable);
  if (response.result() != http::status::ok) {
    throw error{error_kind::unavailable, fmt::format("http://{}{} answers with status {}", endpoint,
                                                     target, response.result_int())};
  }
  co_return response.body();
}

std::string live_endpoint(json const& pool) {
  for (auto const& client : pool.value("clients", json::array())) {
    if (client.value("kind", "") == "server" && client.value("state", "") != "gone") {
      return client.value("endpoint", "");
    }
  }
  return {};
}

}  // namespace

json get_json(std::string const& endpoint, std::string const& target,
              std::chrono::milliseconds patience) {
  asio::io_context context;
  std::exception_ptr failure;
  std::string body;
  asio::co_spawn(context, fetch(endpoint, target, patience),
                 [&](std::exception_ptr why, std::string text) {
                   failure = std::move(why);
                   body = std::move(text);
                 });
  // Bounds the name's resolution too, which the stream's own deadline does not cover.
  context.run_for(patience);
  if (!context.stopped()) {
    throw error{
        error_kind::deadline_exceeded,
        fmt::format("http://{}{} did not answer within {} ms", endpoint, target, patience.count())};
  }
  try {
    if (failure) {
      std::rethrow_exception(failure);
    }
    return json::parse(body);
  } catch (boost::system::system_error const& why) {
    if (why.code() == beast::error::timeout) {
      throw error{error_kind::deadline_exceeded,
                  fmt::format("http://{}{} did not answer within {} ms", endpoint, target,
                              patience.count())};
    }
    throw error{error_kind::unavailable, fmt::format("http://{}{} cannot be read: {}", endpoint,
                                                     target, why.code().message())};
  } catch (json::exception const&) {
    throw error{error_kind::unavailable,
                fmt::format("http://{}{} answers with no JSON", endpoint, target)};
  }
}

json merged(json pool, json server) {
  if (!server.is_object()) {
    return pool;
  }
  auto own = server.value("server", json::object());
  if (auto const loads = server.find("handovers"); loads != server.end()) {
    own["handovers"] = *loads;
  }
  own.update(pool.value("server", json::object()));
  server["server"] = std::move(own);
  pool.erase("server");
  server.update(pool);
  return server;
}

namespace {

using nlohmann::literals::operator""_json_pointer;

constexpr std::chrono::milliseconds patience{2000};

json::json_pointer own_endpoint() {
  return "/server/endpoint"_json_pointer;
}

/// What the server says to `wanted`, to its end.
asio::awaitable<std::string> ask(std::string path, std::string wanted) {
  asio::local::stream_protocol::socket socket{co_await asio::this_coro::executor};
  co_await socket.async_connect(asio::local::stream_protocol::endpoint{path}, asio::use_awaitable);
  wanted += '\n';
  co_await asio::async_write(socket, asio::buffer(wanted), asio::use_awaitable);
  std::string text;
  boost::system::error_code end;
  co_await asio::async_read(socket, asio::dynamic_buffer(text),
                            asio::redirect_error(asio::use_awaitable, end));
  co_return text;
}

/// What the server of that socket tells its own user within `limit`, or however long it takes; discarded if there is none.
json over_socket(std::string const& path, std::string const& wanted,
                 std::optional<std::chrono::milliseconds> limit = std::nullopt) {
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return json(json::value_t::discarded);
  }
  asio::io_context context;
  std::string text;
  asio::co_spawn(context, ask(path, wanted), [&](std::exception_ptr const& why, std::string all) {
    text = why ? "" : std::move(all);
  });
  if (limit) {
    context.run_for(*limit);
  } else {
    context.run();
  }
  return json::parse(text, nullptr, false);
}

std::optional<json> status_over_socket(std::string const& path) {
  auto status = over_socket(path, "status", patience);
  bool const is_one = status.is_object() && status.contains(own_endpoint());
  return is_one ? std::optional{std::move(status)} : std::nullopt;
}

/// Whether it has no place in the pool at present, since its executor is replaced.
bool is_between_executors(json const& status) {
  auto const state = status.value("/executor/state"_json_pointer, "");
  return state == "restarting" || state == "starting";
}

json with_server(json pool, std::string const& runtime_dir) {
  auto const endpoint = live_endpoint(pool);
  auto const path = memhandover::status_socket_of(runtime_dir, pool["pool"].value("device", 0));
  auto status = status_over_socket(path);
  bool const is_its = status && (endpoint.empty() ? is_between_executors(*status)
                                                  : status->at(own_endpoint()) == endpoint);
  if (is_its) {
    pool["server"] = {{"endpoint", status->at(own_endpoint())}, {"answers", true}};
    return merged(pool, std::move(*status));
  }
  if (endpoint.empty()) {
    pool["server"] = nullptr;
    return pool;
  }
  pool["server"] = {{"endpoint", endpoint}, {"answers", true}};
  try {
    return merged(pool, get_json(endpoint, "/v2/sluice/status", patience));
  } catch (error const& why) {
    pool["server"] = {{"endpoint", endpoint}, {"answers", false}, {"error", why.what()}};
    return pool;
  }
}

}  // namespace

json ask_server(std::string const& runtime_dir, std::optional<int> device,
                std::string const& wanted) {
  auto const pool = memhandover::query_status(runtime_dir, device);
  auto const path = memhandover::status_socket_of(runtime_dir, pool["pool"].value("device", 0));
  auto endpoint = live_endpoint(pool);
  if (endpoint.empty()) {  // while its executor is replaced it is not in the pool
    auto const status = status_over_socket(path);
    if (!status) {
      throw error{error_kind::unavailable, "no server serves out of that pool"};
    }
    endpoint = status->at(own_endpoint()).get<std::string>();
  }
  auto answer = over_socket(path, wanted);
  if (!answer.is_object()) {
    throw error{error_kind::unavailable,
                fmt::format("the server at {} did not answer over {}", endpoint, path)};
  }
  if (answer.contains("error")) {
    throw error{error_kind{answer.value("kind", static_cast<int>(error_kind::internal))},
                answer["error"].get<std::string>()};
  }
  return answer;
}

json pool_and_server(std::string const& runtime_dir, std::optional<int> device) {
  auto status = memhandover::query_status(runtime_dir, device);
  auto const several = status.find("pools");
  if (several == status.end()) {
    return with_server(std::move(status), runtime_dir);
  }
  auto pools = json::array();
  for (auto& pool : *several) {
    pools.push_back(with_server(std::move(pool), runtime_dir));
  }
  auto result = pools.front();
  result["pools"] = std::move(pools);
  return result;
}

}  // namespace sluice::cli
