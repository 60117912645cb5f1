#include "memhandover/broker.hpp"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "memhandover/detail/message_field.hpp"
#include "memhandover/detail/processes.hpp"
#include "memhandover/error.hpp"
#include "memhandover/pool_status.hpp"

namespace sluice::memhandover {
namespace {

using json = nlohmann::json;
using detail::field;
using detail::refusal;
using std::chrono::milliseconds;

}  // namespace

broker::broker(options how, std::function<pool_files()> make_pool)
    : options_(std::move(how)), make_pool_(std::move(make_pool)) {
  socket_lock_ = unique_fd{
      ::open((options_.runtime_dir + "/broker.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)};
  if (!socket_lock_ || ::flock(socket_lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    throw error{error_kind::already_exists, "a broker already runs in " + options_.runtime_dir};
  }
  if (roster_lives()) {
    adopt_until_ = clock::now() + options_.adoption_grace;
  } else {
    open_pool(make_pool_());
  }
  listen();
  idle_since_ = clock::now();
}

void broker::listen() {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  auto const path = options_.runtime_dir + "/broker.sock";
  if (path.size() >= sizeof address.sun_path) {
    throw error{error_kind::invalid_argument, "the path " + path + " is too long for a socket"};
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  listener_ = unique_fd{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  ::unlink(path.c_str());  // the lock is ours, so whoever made it is dead
  if (!listener_ ||
      ::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener_.get(), SOMAXCONN) != 0) {
    throw error{error_kind::unavailable, "cannot listen on " + path + ": " + std::strerror(errno)};
  }
}

void broker::open_pool(pool_files files) {
  pool_ = std::make_unique<detail::kept_pool>(std::move(files), [this] { write_roster(); });
  write_roster();
}

bool broker::idle() const {
  return visitors_.empty() && (pool_ == nullptr || !pool_->in_use());
}

std::optional<broker::clock::time_point> broker::wake_at() const {
  if (!pool_) {
    return adopt_until_;
  }
  if (idle()) {
    return idle_since_ + options_.idle_exit;
  }
  if (pool_->must_look_again()) {
    return clock::now() + milliseconds{5};
  }
  return std::nullopt;
}

void broker::run(int stop_fd) {
  for (;;) {
    detail::poll_list polled;
    auto const stop_at = polled.add(stop_fd);
    auto const listener_at = polled.add(listener_.get());
    std::vector<std::size_t> visitor_at;
    for (auto const& who : visitors_) {
      visitor_at.push_back(polled.add(who->deferred ? -1 : who->socket.get()));
    }
    if (pool_) {
      pool_->watch(polled);
    }
    polled.wait(wake_at());
    if (polled.ready(stop_at)) {
      return;
    }
    if (pool_) {
      pool_->serve(polled);
    } else if (clock::now() >= adopt_until_) {
      spdlog::warn("no client of the earlier pool came back; making a new pool");
      open_pool(make_pool_());
    }
    std::vector<bool> ready;
    for (auto const at : visitor_at) {
      ready.push_back(polled.ready(at));
    }
    serve_visitors(ready);
    if (polled.ready(listener_at)) {
      accept_visitor();
    }
    if (!idle()) {
      idle_since_ = clock::now();
    } else if (pool_ && clock::now() - idle_since_ >= options_.idle_exit) {
      spdlog::info("nobody needs the pool any more; the broker ends");
      return;
    }
  }
}

void broker::serve_visitors(std::vector<bool> const& ready) {
  for (std::size_t i = 0; i < ready.size(); ++i) {
    if (ready[i] && !serve(*visitors_[i])) {
      visitors_[i].reset();
    }
  }
  for (auto& who : visitors_) {
    if (pool_ && who && who->deferred) {
      auto request = std::move(*who->deferred);
      who->deferred.reset();
      if (!handle(*who, std::move(request))) {
        who.reset();
      }
    }
  }
  std::erase(visitors_, nullptr);
}

void broker::accept_visitor() {
  unique_fd socket{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)};
  if (!socket) {
    return;
  }
  if (peer_uid(socket.get()) != ::geteuid()) {
    spdlog::warn("refused a connection of another user uid={}", peer_uid(socket.get()));
    return;
  }
  visitors_.push_back(std::make_unique<visitor>());
  visitors_.back()->socket = std::move(socket);
}

bool broker::serve(visitor& who) {
  try {
    auto request = receive_message(who.socket.get());
    return request && handle(who, std::move(*request));
  } catch (error const& why) {
    try {
      send_message(who.socket.get(), refusal(why));
    } catch (error const&) {
      // Gone as well; there is nobody left to tell.
    }
    return false;
  }
}

bool broker::handle(visitor& who, message request) {
  try {
    auto const type = request.body["type"].get<std::string>();
    if (type == "rejoin") {
      return rejoin(who, std::move(request));
    }
    if (type == "chunks") {
      return adopt(who, std::move(request));
    }
    if (!pool_) {
      who.deferred = std::move(request);  // answered as soon as there is a pool
      return true;
    }
    if (type == "status") {
      auto body = describe_pool(pool_->view());
      body["type"] = "status";
      send_message(who.socket.get(), body);
      return true;
    }
    if (type == "show") {
      constexpr std::size_t runs_of_a_message = 500;
      auto body = describe_chunks(pool_->view(), field(request.body, "from", std::uint32_t{0}),
                                  runs_of_a_message);
      body["type"] = "show";
      send_message(who.socket.get(), body);
      return true;
    }
    if (type == "join") {
      if (field(request.body, "version", 0) != protocol_version) {
        throw error{error_kind::unsupported,
                    "the broker speaks version " + std::to_string(protocol_version) +
                        " of the pool's protocol; end the programs that use the pool and start "
                        "them again with one installation of Sluice"};
      }
      pool_->join(who.socket, std::move(request));
      return false;  // the connection is the client's now
    }
    throw error{error_kind::invalid_argument, "the broker knows no message of type " + type};
  } catch (error const& why) {
    send_message(who.socket.get(), refusal(why));
    return false;
  }
}

bool broker::rejoin(visitor& who, message request) {
  constexpr std::size_t rejoin_descriptors = 5;  // ledger, mailroom, doorbell, bell, life pipe
  if (field(request.body, "version", 0) != protocol_version ||
      request.descriptors.size() != rejoin_descriptors) {
    throw error{error_kind::invalid_argument,
                "a rejoin must name this protocol's version and bring five descriptors"};
  }
  if (!pool_) {
    send_message(who.socket.get(), {{"type", "send_chunks"}});
    who.adopting = std::move(request);
    return true;
  }
  if (field(request.body, "pool_id", std::uint64_t{0}) != pool_->view().header().pool_id) {
    throw error{error_kind::not_found,
                "the broker keeps another pool than the one this client belongs to"};
  }
  pool_->rejoin(who.socket, std::move(request));
  return false;
}

/// Takes chunks of a pool that is being offered; with the last of them the pool is this broker's.
bool broker::adopt(visitor& who, message request) {
  if (!who.adopting) {
    throw error{error_kind::invalid_argument,
                "chunk descriptors came without a rejoin before them"};
  }
  std::move(request.descriptors.begin(), request.descriptors.end(), std::back_inserter(who.chunks));
  if (who.chunks.size() < field(who.adopting->body, "chunk_descriptors", std::size_t{0})) {
    return true;
  }
  auto first = std::move(*who.adopting);
  who.adopting.reset();
  if (!pool_) {
    pool_files files;
    files.ledger = reopen_read_write(first.descriptors.at(0).get());
    files.mailroom = duplicate(first.descriptors.at(1).get());
    files.doorbell = duplicate(first.descriptors.at(2).get());
    files.chunks = std::move(who.chunks);
    open_pool(std::move(files));
    spdlog::info("adopted the pool of an earlier broker");
  }
  return rejoin(who, std::move(first));
}

/// Writes down who uses the pool, so that a successor knows whether there is somebody to wait for.
void broker::write_roster() const {
  json const roster{{"clients", pool_ ? pool_->users() : json::array()}};
  auto const path = options_.runtime_dir + "/pool.json";
  {
    std::ofstream file{path + ".new", std::ios::trunc};
    file << roster.dump();
  }
  if (::rename((path + ".new").c_str(), path.c_str()) != 0) {
    spdlog::warn("cannot write {} reason=\"{}\"", path, std::strerror(errno));
  }
}

bool broker::roster_lives() const {
  std::ifstream file{options_.runtime_dir + "/pool.json"};
  auto const roster = json::parse(file, nullptr, false);
  if (!roster.is_object() || !roster.contains("clients") || !roster["clients"].is_array()) {
    return false;
  }
  return std::any_of(roster["clients"].begin(), roster["clients"].end(), [](json const& entry) {
    try {
      return static_cast<bool>(
          detail::open_process(entry.at("pid").get<int>(), entry.at("start").get<std::uint64_t>()));
    } catch (json::exception const&) {
      return false;
    }
  });
}

}  // namespace sluice::memhandover
