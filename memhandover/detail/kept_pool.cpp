#include "memhandover/detail/kept_pool.hpp"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "memhandover/detail/client_entries.hpp"
#include "memhandover/detail/conversation.hpp"
#include "memhandover/detail/processes.hpp"
#include "memhandover/detail/server_manifest.hpp"
#include "memhandover/error.hpp"

namespace sluice::memhandover::detail {
namespace {

/// The same bell for the ledger's writer. Throws `unavailable`.
unique_fd bell_for_writer(unique_fd const& bell) {
  auto second = duplicate(bell.get());
  if (!second) {
    throw error{error_kind::unavailable,
                std::string{"cannot open a client's bell again: "} + std::strerror(errno)};
  }
  return second;
}

}  // namespace

bool kept_pool::client::alone() const {
  pollfd pipe{life.get(), POLLIN, 0};
  return life && ::poll(&pipe, 1, 0) == 1 && (pipe.revents & POLLHUP) != 0;
}

int kept_pool::client::end_descendants(std::uint64_t pipe_inode) {
  int const found = end_holders(pipe_inode);
  look_at = std::chrono::steady_clock::now() + look_every;
  if (life) {
    look_every = std::min(2 * look_every, std::chrono::milliseconds{100});
  }
  return found;
}

kept_pool::kept_pool(pool_files files, std::chrono::milliseconds server_grace,
                     std::function<void()> users_changed)
    : files_(std::move(files)),
      view_(files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write),
      manifest_(files_.manifest.get(), view_.header().chunk_count,
                shared_segment::access::read_write),
      server_grace_(server_grace),
      users_changed_(std::move(users_changed)) {
  adopt_clients();
}

void kept_pool::adopt_clients() {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto& entry = view_.clients()[slot];
    if (has_status(entry, client_status::empty)) {
      continue;
    }
    auto& record = clients_.at(slot);
    record.present = true;
    record.pid = static_cast<int>(entry.pid.load());
    record.process = open_process(record.pid, entry.start_ticks.load());
  }
  auto const writer = view_.writer_slot();
  if (writer >= max_clients || !clients_.at(writer).process) {
    become_writer();
  }
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).present && !clients_.at(slot).process) {
      client_exited(slot);
    }
  }
}

bool kept_pool::in_use() const noexcept {
  return (writer_ && writer_->left_chunks() > 0) ||
         std::any_of(clients_.begin(), clients_.end(), [](client const& c) { return c.present; });
}

std::optional<std::chrono::steady_clock::time_point> kept_pool::wake_at() const {
  std::optional<std::chrono::steady_clock::time_point> wake;
  auto at = [&wake](auto when) { wake = std::min(wake.value_or(when), when); };
  for (auto const& record : clients_) {
    if (record.orphaned()) {  // descendants of the dead are looked for until none is left
      at(record.look_at);
    }
  }
  if (writer_ && writer_->left_chunks() > 0) {
    auto const until = static_cast<std::int64_t>(view_.header().left_until_ns.load());
    at(std::chrono::steady_clock::now() +
       std::chrono::nanoseconds{std::max<std::int64_t>(0, until - monotonic_ns())});
  }
  return wake;
}

std::uint64_t kept_pool::untouched_host_bytes() const noexcept {
  struct stat status {};
  if (view_.shape().backend != backend_kind::host ||
      ::fstat(files_.chunks.front().get(), &status) != 0) {
    return 0;
  }
  constexpr std::uint64_t block = 512;
  auto const touched = static_cast<std::uint64_t>(status.st_blocks) * block;
  return view_.shape().bytes() - std::min(view_.shape().bytes(), touched);
}

nlohmann::json kept_pool::users() const {
  auto list = nlohmann::json::array();
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).present && clients_.at(slot).process) {
      list.push_back(
          {{"pid", clients_.at(slot).pid}, {"start", view_.clients()[slot].start_ticks.load()}});
    }
  }
  return list;
}

void kept_pool::watch(poll_list& polled) {
  doorbell_at_ = polled.add(writer_ ? files_.doorbell.get() : -1);
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto const& record = clients_.at(slot);
    client_at_.at(slot) = {polled.add(record.socket.get()), polled.add(record.process.get()),
                           polled.add(record.life.get())};
  }
}

void kept_pool::serve(poll_list const& polled) {
  if (writer_ && polled.ready(doorbell_at_)) {
    eventfd_t count = 0;
    (void)::eventfd_read(files_.doorbell.get(), &count);
    writer_->pump();
  }
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto& record = clients_.at(slot);
    if (record.socket && polled.ready(client_at_.at(slot).socket)) {
      read_client(slot);
    }
    if (record.process && polled.ready(client_at_.at(slot).process)) {
      client_exited(slot);
    }
    if (record.life && record.process && polled.ready(client_at_.at(slot).life)) {
      client_exited(slot);  // closed by the client itself: it has become another program
    }
    if (record.orphaned()) {
      finish(slot);
    }
  }
  end_grace();
  appoint_ready_server();
}

/// Without a server nobody else lets go of what one has left.
void kept_pool::end_grace() {
  if (writer_ && writer_->left_chunks() > 0 &&
      monotonic_ns() >= static_cast<std::int64_t>(view_.header().left_until_ns.load())) {
    auto const freed = writer_->let_go(writer_->left_chunks());
    manifest_.clear();
    spdlog::info("no server came for what the last one has left chunks={} pool=\"{}\"", freed,
                 name_of(view_.shape()));
  }
}

void kept_pool::join(unique_fd& socket, message request) {
  auto const kind = field(request.body, "kind", std::string{"training"});
  bool const is_server = kind == "server";
  if (request.descriptors.size() != 1) {
    throw error{error_kind::invalid_argument,
                "a join brings one descriptor, the read end of the client's life pipe"};
  }
  if (is_server) {
    if (auto const other = server_slot()) {
      throw error{error_kind::already_exists,
                  "the pool of " + name_of(view_.shape()) +
                      " already has an inference server (pid " +
                      std::to_string(clients_.at(*other).pid) +
                      "); stop it first, or give this one another --runtime-dir"};
    }
  }
  auto const slot = empty_slot(view_);
  client record;
  record.pid = peer_pid(socket.get());
  record.process = open_process(record.pid, process_start_ticks(record.pid));
  if (!record.process) {
    throw error{error_kind::unavailable, "the client that wanted to join has already ended"};
  }
  record.life = std::move(request.descriptors.front());
  record.bell = unique_fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!record.bell) {
    throw error{error_kind::unavailable,
                std::string{"cannot create a bell: "} + std::strerror(errno)};
  }
  // Before anything is changed: whoever cannot be given what he needs is refused.
  auto writers_bell = bell_for_writer(record.bell);
  auto const ledger =
      is_server ? reopen_read_write(files_.ledger.get()) : reopen_read_only(files_.ledger.get());
  auto const published = is_server ? reopen_read_write(files_.manifest.get())
                                   : reopen_read_only(files_.manifest.get());
  new_client const who{is_server ? client_kind::server : client_kind::training, record.pid,
                       inode_of(record.life.get()), field(request.body, "name", std::string{}),
                       field(request.body, "endpoint", std::string{})};
  clients_.at(slot) = std::move(record);
  write_client(view_, slot, who);
  clients_.at(slot).present = true;
  clients_.at(slot).socket = std::move(socket);
  users_changed_();
  spdlog::info("a client joins kind={} pid={} slot={} pool=\"{}\"", kind, clients_.at(slot).pid,
               slot, name_of(view_.shape()));
  try {
    welcome(slot, ledger, published);
  } catch (error const& gone) {
    spdlog::info("a client could not be told of its place pid={} reason=\"{}\"",
                 clients_.at(slot).pid, gone.what());
    // If it lives it hears that it has no broker; its life pipe tells the rest.
    clients_.at(slot).socket.reset();
    return;
  }
  if (writer_) {
    writer_->set_bell(slot, std::move(writers_bell));
  } else {
    tell_server({{"type", "client_joined"}, {"slot", slot}}, {clients_.at(slot).bell.get()});
  }
}

/// Sends a new client everything by which it reaches the pool.
void kept_pool::welcome(std::uint32_t slot, unique_fd const& ledger, unique_fd const& published) {
  auto const& record = clients_.at(slot);
  send_message(record.socket.get(),
               {{"type", "joined"}, {"slot", slot}, {"chunk_descriptors", files_.chunks.size()}},
               {ledger.get(), files_.mailroom.get(), published.get(), files_.doorbell.get(),
                record.bell.get()});
  send_chunks(record.socket.get(), files_.chunks);
}

/// A server that was the writer before it had opened the device would leave everybody waiting
/// meanwhile.
void kept_pool::hear_ready(std::uint32_t slot) {
  if (view_.clients()[slot].kind.load() != static_cast<std::uint32_t>(client_kind::server)) {
    return;
  }
  clients_.at(slot).ready = true;
  appoint_ready_server();
}

bool kept_pool::dead_server_holds() const {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).orphaned() &&
        view_.clients()[slot].kind.load() == static_cast<std::uint32_t>(client_kind::server)) {
      return true;
    }
  }
  return false;
}

/// A server is appointed once what its predecessor held has been taken back: then it finds all that
/// is left to it. The broker's own writing ends first: there is never a second writer.
void kept_pool::appoint_ready_server() {
  auto const slot = writer_ ? server_slot() : std::nullopt;
  if (!slot || !clients_.at(*slot).ready || dead_server_holds()) {
    return;
  }
  writer_->pump();
  writer_.reset();
  view_.header().serving_now.store(1);
  auto const generation = (view_.header().writer.load() >> 16U) + 1;
  view_.header().writer.store(generation << 16U | *slot, std::memory_order_release);
  spdlog::info("a server is ready and writes the ledger slot={} pool=\"{}\"", *slot,
               name_of(view_.shape()));
  tell_appointed(*slot);
}

/// Once for each connection: a death that is told of twice may be that of the slot's next owner.
void kept_pool::tell_appointed(std::uint32_t slot) {
  tell_server({{"type", "appointed"}});
  report_to_server(slot);
}

/// Everything the server in `slot` must know as writer: who can be woken, and who has died.
void kept_pool::report_to_server(std::uint32_t slot) {
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

void kept_pool::become_writer() {
  auto const generation = (view_.header().writer.load() >> 16U) + 1;
  view_.header().writer.store(generation << 16U | broker_slot, std::memory_order_release);
  view_.header().pause_until_ns.store(0);
  view_.header().serving_now.store(0);
  writer_ = std::make_unique<ledger_writer>(view_);
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
      take_back(slot);  // the last writer died before it did
      clear_slot(slot);
    }
  }
  writer_->pump();
}

void kept_pool::rejoin(unique_fd& socket, message request) {
  auto const slot = field(request.body, "slot", max_clients);
  auto const pid = peer_pid(socket.get());
  if (slot >= max_clients || !clients_.at(slot).present || clients_.at(slot).pid != pid) {
    throw error{error_kind::not_found, "the client has no place in the pool that it came back to"};
  }
  bool const ready = field(request.body, "ready", false);
  auto& record = clients_.at(slot);
  auto writers_bell = bell_for_writer(request.descriptors.at(4));
  record.bell = std::move(request.descriptors.at(4));
  record.life = std::move(request.descriptors.at(5));
  record.socket = std::move(socket);
  send_message(record.socket.get(), {{"type", "rejoined"}});
  spdlog::info("a client came back pid={} slot={}", record.pid, slot);
  if (writer_) {
    writer_->set_bell(slot, std::move(writers_bell));
    writer_->pump();
  } else if (view_.writer_slot() == slot) {
    tell_appointed(slot);  // an earlier broker has named it, and may have died before it said so
  } else {
    // A server that was appointed meanwhile has not been told of who had not come back by then.
    tell_server({{"type", "client_joined"}, {"slot", slot}}, {record.bell.get()});
  }
  if (ready) {
    hear_ready(slot);
  }
}

void kept_pool::read_client(std::uint32_t slot) {
  auto& record = clients_.at(slot);
  try {
    auto const received = receive_message(record.socket.get());
    if (!received) {
      record.socket.reset();  // its process's exit, not this, decides what becomes of its memory
      return;
    }
    if (received->body["type"] == "reclaimed" && view_.writer_slot() == slot) {
      auto const gone = field(received->body, "slot", max_clients);
      if (gone < max_clients && clients_.at(gone).reported) {
        clear_slot(gone);
      }
    } else if (received->body["type"] == "ready") {
      hear_ready(slot);
    }
  } catch (error const& why) {
    spdlog::warn("a client's message could not be read pid={} reason=\"{}\"", record.pid,
                 why.what());
    record.socket.reset();
  }
}

void kept_pool::client_exited(std::uint32_t slot) {
  auto& record = clients_.at(slot);
  record.process.reset();
  record.socket.reset();
  view_.clients()[slot].status.store(static_cast<std::uint32_t>(client_status::gone),
                                     std::memory_order_release);
  spdlog::info("a client has ended pid={} slot={}", record.pid, slot);
  if (view_.writer_slot() == slot) {
    become_writer();
  }
  if (!record.alone()) {
    record.end_descendants(view_.clients()[slot].life_inode.load());
  }
}

/// The last process that could reach the client's memory may have gone: then everything it held is
/// taken back.
void kept_pool::finish(std::uint32_t slot) {
  auto& record = clients_.at(slot);
  auto const inode = view_.clients()[slot].life_inode.load();
  // One may have been forked while the last look was taken.
  bool const look = std::chrono::steady_clock::now() >= record.look_at;
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
    take_back(slot);
    clear_slot(slot);
    writer_->pump();
  } else {
    record.reported = true;
    tell_server({{"type", "client_gone"}, {"slot", slot}});
  }
}

/// What a client held is free, but for what a server has published: that waits for its successor.
void kept_pool::take_back(std::uint32_t slot) {
  std::uint32_t left = 0;
  if (view_.clients()[slot].kind.load() == static_cast<std::uint32_t>(client_kind::server) &&
      server_grace_.count() > 0) {
    auto const grace_ns = std::chrono::nanoseconds{server_grace_}.count();
    left = leave_published(view_, manifest_, *writer_, slot, monotonic_ns() + grace_ns);
  }
  auto const freed = writer_->reclaim(slot);
  spdlog::info("took back what a client held slot={} chunks={} left={} pool=\"{}\"", slot, freed,
               left, name_of(view_.shape()));
}

void kept_pool::clear_slot(std::uint32_t slot) {
  view_.clients()[slot].status.store(static_cast<std::uint32_t>(client_status::empty),
                                     std::memory_order_release);
  clients_.at(slot) = client{};
  users_changed_();
}

std::optional<std::uint32_t> kept_pool::server_slot() const {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).present && clients_.at(slot).process &&
        view_.clients()[slot].kind.load() == static_cast<std::uint32_t>(client_kind::server)) {
      return slot;
    }
  }
  return std::nullopt;
}

void kept_pool::tell_server(nlohmann::json const& body, std::vector<int> const& descriptors) {
  auto const slot = view_.writer_slot();
  if (slot >= max_clients || !clients_.at(slot).socket) {
    return;  // it will hear of it when it comes back, or its death makes us the writer
  }
  try {
    send_message(clients_.at(slot).socket.get(), body, descriptors);
  } catch (error const&) {
    clients_.at(slot).socket.reset();
  }
}

}  // namespace sluice::memhandover::detail
