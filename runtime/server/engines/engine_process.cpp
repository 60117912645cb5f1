#include "runtime/server/engines/engine_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/wire.hpp"
#include "runtime/policy/policy.hpp"

namespace sluice::server {
namespace {

using memhandover::unique_fd;
using nlohmann::json;

/// Of a log, for a client.
constexpr std::size_t most_lines = 5, most_bytes = 1024;

void replace_all(std::string& in, std::string_view what, std::string const& by) {
  for (std::size_t at = 0; (at = in.find(what, at)) != std::string::npos; at += by.size()) {
    in.replace(at, what.size(), by);
  }
}

}  // namespace

std::string with_address(std::string text, engine_address const& address) {
  replace_all(text, policy::port_placeholder, std::to_string(address.port));
  replace_all(text, policy::socket_placeholder, address.socket);
  return text;
}

std::uint16_t free_port() {
  unique_fd const socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (!socket || ::bind(socket.get(), generic, length) != 0 ||
      ::getsockname(socket.get(), generic, &length) != 0) {
    throw memhandover::system_error("there is no free port on 127.0.0.1 for an engine");
  }
  return ntohs(address.sin_port);
}

engine_process::engine_process(engine_order const& order) : log_(order.log) {
  unique_fd const log{
      ::open(log_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR)};
  if (!log) {
    throw memhandover::system_error(fmt::format("the log {} cannot be written", log_.string()));
  }
  std::error_code ignored;
  log_begin_ = std::filesystem::file_size(log_, ignored);
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw memhandover::system_error("an engine cannot be started");
  }
  server_end_.reset(ends[0]);
  keeper_ = child_process::start({order.keeper.string(), "--keep-engine", order.name},
                                 unique_fd{ends[1]});
  memhandover::send_message(server_end_.get(),
                            {{"type", "run"},
                             {"command", order.command},
                             {"environment", order.environment},
                             {"folder", order.folder.string()}},
                            {log.get()});
}

engine_process::~engine_process() {
  server_end_.reset();  // which ends the engine, and then its keeper
  if (keeper_.pid() != 0) {
    (void)keeper_.wait();
  }
}

std::optional<json> engine_process::hear() {
  auto came = memhandover::receive_if_there(server_end_.get());
  if (came.received) {
    return std::move(came.received->body);
  }
  if (came.has_ended) {
    return json{{"type", "ended"}, {"text", "has lost the process that kept it"}};
  }
  return std::nullopt;
}

void engine_process::stop() {
  try {
    memhandover::send_message(server_end_.get(), {{"type", "stop"}});
  } catch (error const&) {  // it has ended already
  }
}

std::string engine_process::last_lines() const {
  std::ifstream file{log_, std::ios::binary};
  file.seekg(0, std::ios::end);
  auto const end = static_cast<std::uintmax_t>(std::max<std::streamoff>(file.tellg(), 0));
  auto const begin = std::max(log_begin_, end > most_bytes ? end - most_bytes : 0);
  if (begin >= end) {
    return {};
  }
  std::string text(end - begin, '\0');
  file.seekg(static_cast<std::streamoff>(begin));
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  while (text.ends_with('\n')) {
    text.pop_back();
  }
  auto from = text.size();
  for (std::size_t lines = 0; lines < most_lines && from != std::string::npos && from > 0;
       ++lines) {
    from = text.rfind('\n', from - 1);
  }
  return from == std::string::npos ? text : text.substr(from == 0 ? 0 : from + 1);
}

}  // namespace sluice::server
