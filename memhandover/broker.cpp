#include "memhandover/broker.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "memhandover/address_story.hpp"
#include "memhandover/detail/processes.hpp"
#include "memhandover/error.hpp"
#include "memhandover/pool_status.hpp"
#include "memhandover/shared_text.hpp"

namespace sluice::memhandover {
namespace {

using json = nlohmann::json;
using std::chrono::milliseconds;

void set_text(char* to, std::size_t size, std::string const& text) {
  auto const fitting = cut_text(text, size - 1);
  std::memset(to, 0, size);
  std::memcpy(to, fitting.data(), fitting.size());
}

json refusal(error const& why) {
  return {{"type", "error"}, {"kind", static_cast<int>(why.kind())}, {"message", why.what()}};
}

/// One field of a message, checked. The default counts where the field is missing.
template <typename T>
T field(json const& body, char const* name, T missing) {
  auto const found = body.find(name);
  if (found == body.end()) {
    return missing;
  }
  try {
    return found->get<T>();
  } catch (json::exception const&) {
    throw error{error_kind::invalid_argument,
                std::string{"the field "} + name + " of a message has the wrong type"};
  }
}

}  // namespace

bool broker::client::alone() const {
  pollfd pipe{life.get(), POLLIN, 0};
  return life && ::poll(&pipe, 1, 0) == 1 && (pipe.revents & POLLHUP) != 0;
}

int broker::client::end_descendants(std::uint64_t pipe_inode) {
  int const found = detail::end_holders(pipe_inode);
  look_at = clock::now() + look_every;
  if (life) {
    look_every = std::min(2 * look_every, milliseconds{100});
  }
  return found;
}

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
  files_ = std::move(files);
  view_ = std::make_unique<ledger_view>(files_.ledger.get(), files_.mailroom.get(),
                                        shared_segment::access::read_write);
  try {
    adopt_clients();
  } catch (...) {
    // Whoever offers the pool next begins anew.
    writer_.reset();
    clients_ = {};
    view_.reset();
    files_ = {};
    throw;
  }
  write_roster();
}

/// Takes over who is in the ledger: nobody in a new pool, the clients of an earlier broker in an
/// adopted one.
void broker::adopt_clients() {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto& entry = view_->clients()[slot];
    if (entry.status.load() == static_cast<std::uint32_t>(client_status::empty)) {
      continue;
    }
    auto& record = clients_.at(slot);
    record.present = true;
    record.pid = static_cast<int>(entry.pid.load());
    record.process = detail::open_process(record.pid, entry.start_ticks.load());
  }
  auto const writer = view_->writer_slot();
  if (writer >= max_clients || !clients_.at(writer).process) {
    become_writer();
  }
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).present && !clients_.at(slot).process) {
      client_exited(slot);
    }
  }
}

void broker::run(int stop_fd) {
  for (;;) {
    std::vector<pollfd> polled;
    auto watch = [&polled](int fd) {
      polled.push_back({fd, POLLIN, 0});
      return polled.size() - 1;
    };
    auto const stop_at = watch(stop_fd);
    auto const listener_at = watch(listener_.get());
    auto const doorbell_at = watch(writer_ ? files_.doorbell.get() : -1);
    auto const first_visitor = polled.size();
    auto const visitor_count = visitors_.size();
    for (auto const& who : visitors_) {
      watch(who->deferred ? -1 : who->socket.get());
    }
    struct places {
      std::size_t socket, process, life;
    };
    std::array<places, max_clients> client_at{};
    for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
      auto const& record = clients_.at(slot);
      client_at.at(slot) = {watch(record.socket.get()), watch(record.process.get()),
                            watch(record.life.get())};
    }

    bool const idle = visitors_.empty() && std::none_of(clients_.begin(), clients_.end(),
                                                        [](client const& c) { return c.present; });
    auto const now = clock::now();
    std::optional<clock::time_point> wake;
    if (!view_) {
      wake = adopt_until_;
    } else if (idle) {
      wake = idle_since_ + options_.idle_exit;
    } else {
      for (auto const& record : clients_) {
        if (record.orphaned()) {  // descendants of the dead are looked for until none is left
          wake = std::min(wake.value_or(record.look_at), record.look_at);
        }
      }
    }
    auto const timeout = wake ? static_cast<int>(std::max<std::int64_t>(
                                    0, std::chrono::ceil<milliseconds>(*wake - now).count()))
                              : -1;
    if (::poll(polled.data(), polled.size(), timeout) < 0 && errno != EINTR) {
      throw error{error_kind::internal, std::string{"poll failed: "} + std::strerror(errno)};
    }
    auto ready = [&polled](std::size_t at) { return polled[at].revents != 0; };
    if (ready(stop_at)) {
      return;
    }
    if (!view_ && clock::now() >= adopt_until_) {
      spdlog::warn("no client of the earlier pool came back; making a new pool");
      open_pool(make_pool_());
    }
    if (writer_ && ready(doorbell_at)) {
      eventfd_t count = 0;
      (void)::eventfd_read(files_.doorbell.get(), &count);
      writer_->pump();
    }
    for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
      auto& record = clients_.at(slot);
      if (record.socket && ready(client_at.at(slot).socket)) {
        read_client(slot);
      }
      if (record.process && ready(client_at.at(slot).process)) {
        client_exited(slot);
      }
      if (record.life && record.process && ready(client_at.at(slot).life)) {
        client_exited(slot);  // closed by the client itself: it has become another program
      }
      if (record.orphaned()) {
        finish(slot);
      }
    }
    for (std::size_t i = 0; i < visitor_count; ++i) {
      if (ready(first_visitor + i) && !serve(*visitors_[i])) {
        visitors_[i].reset();
      }
    }
    if (view_) {
      for (auto& who : visitors_) {
        if (who && who->deferred) {
          auto request = std::move(*who->deferred);
          who->deferred.reset();
          if (!handle(*who, std::move(request))) {
            who.reset();
          }
        }
      }
    }
    std::erase(visitors_, nullptr);
    if (ready(listener_at)) {
      accept_visitor();
    }
    bool const idle_now =
        visitors_.empty() &&
        std::none_of(clients_.begin(), clients_.end(), [](client const& c) { return c.present; });
    if (!idle_now) {
      idle_since_ = clock::now();
    } else if (view_ && clock::now() - idle_since_ >= options_.idle_exit) {
      spdlog::info("nobody needs the pool any more; the broker ends");
      return;
    }
  }
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
    if (type == "rejoin" || type == "chunks") {
      return rejoin(who, std::move(request));
    }
    if (!view_) {
      who.deferred = std::move(request);  // answered as soon as there is a pool
      return true;
    }
    if (type == "status") {
      auto body = status();
      body["type"] = "status";
      send_message(who.socket.get(), body);
      return true;
    }
    if (type == "show") {
      constexpr std::size_t runs_of_a_message = 500;
      auto body =
          describe_chunks(*view_, field(request.body, "from", std::uint32_t{0}), runs_of_a_message);
      body["type"] = "show";
      send_message(who.socket.get(), body);
      return true;
    }
    if (type == "address") {
      auto body = describe_address(*view_, field(request.body, "address", std::uint64_t{0}));
      body["type"] = "address";
      send_message(who.socket.get(), body);
      return true;
    }
    if (type == "join") {
      join(who, std::move(request));
      return false;  // the connection is the client's now
    }
    throw error{error_kind::invalid_argument, "the broker knows no message of type " + type};
  } catch (error const& why) {
    send_message(who.socket.get(), refusal(why));
    return false;
  }
}

void broker::join(visitor& who, message request) {
  if (field(request.body, "version", 0) != protocol_version) {
    throw error{error_kind::unsupported,
                "the broker speaks version " + std::to_string(protocol_version) +
                    " of the pool's protocol; end the programs that use the pool and start "
                    "them again with one installation of Sluice"};
  }
  auto const kind = field(request.body, "kind", std::string{"training"});
  bool const is_server = kind == "server";
  if (request.descriptors.size() != 1) {
    throw error{error_kind::invalid_argument,
                "a join brings one descriptor, the read end of the client's life pipe"};
  }
  if (is_server) {
    if (auto const other = server_slot()) {
      throw error{error_kind::already_exists,
                  "the pool in " + options_.runtime_dir + " already has an inference server (pid " +
                      std::to_string(clients_.at(*other).pid) +
                      "); stop it first, or give this one another --runtime-dir"};
    }
  }
  auto const entries = view_->clients();
  std::uint32_t slot = 0;
  while (slot < max_clients &&
         (clients_.at(slot).present ||
          entries[slot].status.load() != static_cast<std::uint32_t>(client_status::empty))) {
    ++slot;
  }
  if (slot == max_clients) {
    throw error{error_kind::unavailable,
                "the pool has " + std::to_string(max_clients) + " clients, which is its limit"};
  }
  auto const pid = peer_pid(who.socket.get());
  auto const start = process_start_ticks(pid);
  auto process = detail::open_process(pid, start);
  if (!process) {
    throw error{error_kind::unavailable, "the client that wanted to join has already ended"};
  }
  unique_fd bell{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!bell) {
    throw error{error_kind::unavailable,
                std::string{"cannot create a bell: "} + std::strerror(errno)};
  }

  // Before anything is changed: whoever cannot be given what he needs is refused.
  auto const ledger =
      is_server ? reopen_read_write(files_.ledger.get()) : reopen_read_only(files_.ledger.get());
  auto writers_bell = duplicate(bell.get());
  if (!writers_bell) {
    throw error{error_kind::unavailable,
                std::string{"cannot open a client's bell again: "} + std::strerror(errno)};
  }

  auto& record = clients_.at(slot);
  record = client{};
  record.pid = pid;
  record.process = std::move(process);
  record.life = std::move(request.descriptors.front());
  record.bell = std::move(bell);
  auto& entry = entries[slot];
  entry.kind.store(
      static_cast<std::uint32_t>(is_server ? client_kind::server : client_kind::training));
  entry.pid.store(static_cast<std::uint32_t>(pid));
  entry.start_ticks.store(start);
  entry.life_inode.store(detail::inode_of(record.life.get()));
  set_text(entry.name, sizeof entry.name, field(request.body, "name", std::string{}));
  set_text(entry.endpoint, sizeof entry.endpoint, field(request.body, "endpoint", std::string{}));
  // A mailbox may have had an earlier owner; what it counted must not be shown as this one's.
  auto& mailbox = view_->mailbox(slot);
  for (auto* value : {&mailbox.micro_batch, &mailbox.global_batch, &mailbox.arena_chunks,
                      &mailbox.spare_chunks, &mailbox.persistent_chunks, &mailbox.waiting}) {
    value->store(0);
  }
  for (auto* value : {&mailbox.samples, &mailbox.commits, &mailbox.discards}) {
    value->store(0);
  }
  entry.status.store(static_cast<std::uint32_t>(client_status::live), std::memory_order_release);
  record.present = true;
  record.socket = std::move(who.socket);
  write_roster();

  try {
    auto const socket = record.socket.get();
    send_message(socket,
                 {{"type", "joined"}, {"slot", slot}, {"chunk_descriptors", files_.chunks.size()}},
                 {ledger.get(), files_.mailroom.get(), files_.doorbell.get(), record.bell.get()});
    for (std::size_t first = 0; first < files_.chunks.size(); first += max_descriptors) {
      std::vector<int> batch;
      for (std::size_t i = first; i < std::min(first + max_descriptors, files_.chunks.size());
           ++i) {
        batch.push_back(files_.chunks[i].get());
      }
      send_message(socket, {{"type", "chunks"}, {"first", first}}, batch);
    }
  } catch (error const& gone) {
    spdlog::info("a client could not be told of its place pid={} reason=\"{}\"", pid, gone.what());
    record.socket
        .reset();  // if it lives it hears that it has no broker; its life pipe tells the rest
    return;
  }
  spdlog::info("a client joined kind={} pid={} slot={}", kind, pid, slot);
  if (is_server) {
    appoint_server(slot);
  } else if (writer_) {
    writer_->set_bell(slot, std::move(writers_bell));
  } else {
    tell_server({{"type", "client_joined"}, {"slot", slot}}, {record.bell.get()});
  }
}

/// Ends the broker's own writing, then names the server: there is never a second writer.
void broker::appoint_server(std::uint32_t slot) {
  if (writer_) {
    writer_->pump();
    writer_.reset();
  }
  view_->header().serving_now.store(1);
  auto const generation = (view_->header().writer.load() >> 16U) + 1;
  view_->header().writer.store(generation << 16U | slot, std::memory_order_release);
  tell_server({{"type", "appointed"}});
  report_to_server(slot);
}

/// Everything the server in `slot` must know as writer: who can be woken, and who has died.
void broker::report_to_server(std::uint32_t slot) {
  for (std::uint32_t other = 0; other < max_clients; ++other) {
    auto& record = clients_.at(other);
    if (other == slot || !record.present) {
      continue;
    }
    if (record.process && record.bell) {
      tell_server({{"type", "client_joined"}, {"slot", other}}, {record.bell.get()});
    } else if (record.reported) {
      tell_server({{"type", "client_gone"}, {"slot", other}});
    }
  }
}

void broker::become_writer() {
  auto const generation = (view_->header().writer.load() >> 16U) + 1;
  view_->header().writer.store(generation << 16U | broker_slot, std::memory_order_release);
  view_->header().pause_until_ns.store(0);
  view_->header().serving_now.store(0);
  writer_ = std::make_unique<ledger_writer>(*view_);
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto& record = clients_.at(slot);
    if (record.bell) {
      auto bell = duplicate(record.bell.get());
      if (!bell) {
        record.socket.reset();  // it comes back with its bell
      }
      writer_->set_bell(slot, std::move(bell));
      if (record.present && record.process) {
        writer_->demand(slot,
                        0);  // whatever the last writer had demanded is nobody's wish any more
      }
    }
    if (record.present && record.reported) {
      writer_->reclaim(slot);  // the last writer died before it did
      clear_slot(slot);
    }
  }
  writer_->pump();
}

bool broker::rejoin(visitor& who, message request) {
  auto const type = request.body["type"].get<std::string>();
  if (type == "chunks") {
    if (!who.adopting) {
      throw error{error_kind::invalid_argument,
                  "chunk descriptors came without a rejoin before them"};
    }
    std::move(request.descriptors.begin(), request.descriptors.end(),
              std::back_inserter(who.chunks));
    auto const expected = field(who.adopting->body, "chunk_descriptors", std::size_t{0});
    if (who.chunks.size() < expected) {
      return true;
    }
    auto first = std::move(*who.adopting);
    who.adopting.reset();
    if (!view_) {
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
  constexpr std::size_t rejoin_descriptors = 5;  // ledger, mailroom, doorbell, bell, life pipe
  if (field(request.body, "version", 0) != protocol_version ||
      request.descriptors.size() != rejoin_descriptors) {
    throw error{error_kind::invalid_argument,
                "a rejoin must name this protocol's version and bring five descriptors"};
  }
  if (!view_) {
    send_message(who.socket.get(), {{"type", "send_chunks"}});
    who.adopting = std::move(request);
    return true;
  }
  auto const slot = field(request.body, "slot", max_clients);
  auto const pid = peer_pid(who.socket.get());
  if (field(request.body, "pool_id", std::uint64_t{0}) != view_->header().pool_id ||
      slot >= max_clients || !clients_.at(slot).present || clients_.at(slot).pid != pid) {
    throw error{error_kind::not_found,
                "the broker keeps another pool than the one this client belongs to"};
  }
  seat(who, request, slot);
  return false;
}

void broker::seat(visitor& who, message& request, std::uint32_t slot) {
  auto& record = clients_.at(slot);
  auto writers_bell = duplicate(request.descriptors.at(3).get());
  if (!writers_bell) {
    throw error{error_kind::unavailable,
                std::string{"cannot open a client's bell again: "} + std::strerror(errno)};
  }
  record.bell = std::move(request.descriptors.at(3));
  record.life = std::move(request.descriptors.at(4));
  record.socket = std::move(who.socket);
  send_message(record.socket.get(), {{"type", "rejoined"}});
  if (writer_) {
    writer_->set_bell(slot, std::move(writers_bell));
    writer_->pump();
  } else if (view_->writer_slot() == slot) {
    report_to_server(slot);
  }
  spdlog::info("a client came back pid={} slot={}", record.pid, slot);
}

void broker::read_client(std::uint32_t slot) {
  auto& record = clients_.at(slot);
  try {
    auto const received = receive_message(record.socket.get());
    if (!received) {
      record.socket.reset();  // its process's exit, not this, decides what becomes of its memory
      return;
    }
    if (received->body["type"] == "reclaimed" && view_->writer_slot() == slot) {
      auto const gone = field(received->body, "slot", max_clients);
      if (gone < max_clients && clients_.at(gone).reported) {
        clear_slot(gone);
      }
    }
  } catch (error const& why) {
    spdlog::warn("a client's message could not be read pid={} reason=\"{}\"", record.pid,
                 why.what());
    record.socket.reset();
  }
}

void broker::client_exited(std::uint32_t slot) {
  auto& record = clients_.at(slot);
  record.process.reset();
  record.socket.reset();
  view_->clients()[slot].status.store(static_cast<std::uint32_t>(client_status::gone),
                                      std::memory_order_release);
  spdlog::info("a client has ended pid={} slot={}", record.pid, slot);
  if (view_->writer_slot() == slot) {
    become_writer();
  }
  if (!record.alone()) {
    record.end_descendants(view_->clients()[slot].life_inode.load());
  }
}

/// The last process that could reach the client's memory may have gone: then everything it held is
/// taken back.
void broker::finish(std::uint32_t slot) {
  auto& record = clients_.at(slot);
  auto const inode = view_->clients()[slot].life_inode.load();
  // One may have been forked while the last look was taken.
  bool const look = clock::now() >= record.look_at;
  if (record.life) {
    if (!record.alone()) {
      if (look) {
        record.end_descendants(inode);
      }
      return;
    }
  } else if (!look || record.end_descendants(inode) > 0) {
    return;
  }
  record.life.reset();
  if (writer_) {
    auto const freed = writer_->reclaim(slot);
    spdlog::info("took back what a client held slot={} chunks={}", slot, freed);
    clear_slot(slot);
    writer_->pump();
  } else {
    record.reported = true;
    tell_server({{"type", "client_gone"}, {"slot", slot}});
  }
}

void broker::clear_slot(std::uint32_t slot) {
  view_->clients()[slot].status.store(static_cast<std::uint32_t>(client_status::empty),
                                      std::memory_order_release);
  clients_.at(slot) = client{};
  write_roster();
}

std::optional<std::uint32_t> broker::server_slot() const {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).present && clients_.at(slot).process &&
        view_->clients()[slot].kind.load() == static_cast<std::uint32_t>(client_kind::server)) {
      return slot;
    }
  }
  return std::nullopt;
}

void broker::tell_server(nlohmann::json const& body, std::vector<int> const& descriptors) {
  auto const slot = view_->writer_slot();
  if (slot >= max_clients || !clients_.at(slot).socket) {
    return;  // it will hear of it when it comes back, or its death makes us the writer
  }
  try {
    send_message(clients_.at(slot).socket.get(), body, descriptors);
  } catch (error const&) {
    clients_.at(slot).socket.reset();
  }
}

/// Writes down who uses the pool, so that a successor knows whether there is somebody to wait for.
void broker::write_roster() const {
  json roster{{"clients", json::array()}};
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).present && clients_.at(slot).process) {
      roster["clients"].push_back(
          {{"pid", clients_.at(slot).pid}, {"start", view_->clients()[slot].start_ticks.load()}});
    }
  }
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

nlohmann::json broker::status() const {
  return describe_pool(*view_);
}

}  // namespace sluice::memhandover
