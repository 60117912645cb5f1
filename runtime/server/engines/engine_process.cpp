#include "runtime/server/engines/engine_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <random>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/socket_address.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/wire.hpp"
#include "runtime/policy/policy.hpp"
#include "runtime/telemetry/logging.hpp"

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

namespace {

std::string meeting_prefix(int device) {
  return fmt::format("k{}-", device);
}

}  // namespace

std::filesystem::path new_meeting_place(std::filesystem::path const& runtime_folder, int device) {
  return runtime_folder / fmt::format("{}{:08x}", meeting_prefix(device), std::random_device{}());
}

std::vector<std::filesystem::path> meeting_places(std::filesystem::path const& runtime_folder,
                                                  int device) {
  std::vector<std::filesystem::path> found;
  std::error_code ignored;
  for (auto const& each : std::filesystem::directory_iterator{runtime_folder, ignored}) {
    if (each.path().filename().string().starts_with(meeting_prefix(device))) {
      found.push_back(each.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
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
  keeper_pid_ = keeper_.pid();
  identity_ = order.identity;
  address_ = order.address;
  memhandover::send_message(server_end_.get(),
                            {{"type", "run"},
                             {"command", order.command},
                             {"environment", order.environment},
                             {"folder", order.folder.string()},
                             {"meeting", order.meeting.string()},
                             {"patience_ms", order.patience.count()},
                             {"identity", identity_},
                             {"address", {{"socket", address_.socket}, {"port", address_.port}}},
                             {"log", log_.string()},
                             {"log_begin", log_begin_}},
                            {log.get()});
}

engine_process::~engine_process() {
  if (!is_own_) {
    keeper_.leave();
    return;
  }
  say({{"type", "end"}});
  if (keeper_.pid() != 0) {
    server_end_.reset();
    (void)keeper_.wait();
    return;
  }
  // It hangs up when all has ended, which takes the kernel a moment for what has much memory.
  constexpr std::chrono::seconds patience{10};
  auto const until = std::chrono::steady_clock::now() + patience;
  try {
    while (memhandover::receive_message(
        server_end_.get(),
        static_cast<int>(std::max<std::int64_t>(0, std::chrono::ceil<std::chrono::milliseconds>(
                                                       until - std::chrono::steady_clock::now())
                                                       .count())))) {
    }
  } catch (error const&) {  // it is gone, or hangs
  }
}

std::unique_ptr<engine_process> engine_process::meet(std::filesystem::path const& place) {
  constexpr int patience_ms = 2'000;
  auto const path = place.string();
  auto const address = memhandover::socket_address(path);
  if (!address) return nullptr;
  std::unique_ptr<engine_process> met{new engine_process};
  met->is_own_ = false;
  met->server_end_.reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!met->server_end_ ||
      ::connect(met->server_end_.get(), reinterpret_cast<sockaddr const*>(&*address),
                sizeof *address) != 0) {
    if (errno == ECONNREFUSED) ::unlink(path.c_str());
    return nullptr;
  }
  try {
    auto const said = memhandover::receive_message(met->server_end_.get(), patience_ms);
    if (!said || said->body.value("type", "") != "who") return nullptr;
    auto const& who = said->body;
    met->keeper_pid_ = memhandover::peer_pid(met->server_end_.get());
    met->identity_ = who.at("identity");
    auto const& where = who.at("address");
    met->address_ = {where.value("socket", ""), where.value("port", std::uint16_t{0})};
    met->log_ = who.value("log", "");
    met->log_begin_ = who.value("log_begin", std::uintmax_t{0});
    met->pid_ = who.value("pid", 0);
  } catch (std::exception const& failure) {
    spdlog::warn("an engine that may have been left is not asked for place={} reason={}",
                 telemetry::quoted(path), telemetry::quoted(failure.what()));
    return nullptr;
  }
  return met;
}

void engine_process::say(json const& what) const noexcept {
  try {
    memhandover::send_message(server_end_.get(), what);
  } catch (std::exception const&) {  // it has ended already
  }
}

void engine_process::adopt() {
  say({{"type", "adopt"}});
}

void engine_process::leave(json const& notes) {
  if (!std::exchange(is_own_, false)) return;
  say({{"type", "leave"}, {"notes", notes}});
}

std::optional<json> engine_process::hear() {
  memhandover::arrival came;
  try {
    came = memhandover::receive_if_there(server_end_.get());
  } catch (error const&) {
    came.has_ended = true;
  }
  if (came.received) {
    auto& said = came.received->body;
    auto const type = said.value("type", "");
    if (type == "yours") is_own_ = true;
    if (type == "started") pid_ = said.value("pid", 0);
    return std::move(said);
  }
  if (came.has_ended) {
    return json{{"type", "ended"}, {"text", "has lost the process that kept it"}};
  }
  return std::nullopt;
}

void engine_process::stop() {
  if (is_own_) say({{"type", "stop"}});
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
