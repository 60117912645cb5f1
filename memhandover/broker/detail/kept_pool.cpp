#include "memhandover/broker/detail/kept_pool.hpp"

#include <spdlog/spdlog.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/processes.hpp"
#include "memhandover/base/shared_text.hpp"
#include "memhandover/broker/conversation.hpp"
#include "memhandover/broker/detail/admission.hpp"
#include "memhandover/broker/detail/park_order.hpp"
#include "memhandover/device/host_room.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/published_chunks.hpp"
#include "posix/byte_locks.hpp"

namespace sluice::memhandover::detail {
namespace {

/// A client that has just been given its place may not have locked it yet.
constexpr std::chrono::seconds until_locked{2};

}  // namespace

kept_pool::kept_pool(pool_files files, copy_keeper& copies, std::chrono::milliseconds server_grace,
                     std::function<void()> users_changed)
    : files_(std::move(files)),
      view_(files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write),
      manifest_(files_.manifest.get(), view_.header().chunk_count,
                shared_segment::access::read_write),
      copies_(copies),
      server_grace_(server_grace),
      users_changed_(std::move(users_changed)),
      succession_(view_, clients_) {
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
    record.who = process_of(entry);
    record.unseen = is_foreign(record.who);
    if (record.unseen) {
      record.look_at = std::chrono::steady_clock::now() + until_locked;
    } else {
      record.process = open_process(record.who.pid, record.who.start_ticks);
    }
  }
  auto const writer = view_.writer_slot();
  if (writer >= max_clients || !clients_.at(writer).lives()) {
    become_writer();
  }
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).present && !clients_.at(slot).lives()) {
      client_exited(slot);
    }
  }
}

bool kept_pool::in_use() const noexcept {
  auto const* const writer = succession_.writer();
  return (writer != nullptr && writer->left_chunks() > 0) ||
         std::any_of(clients_.begin(), clients_.end(), [](auto const& c) { return c.present; });
}

std::optional<std::chrono::steady_clock::time_point> kept_pool::wake_at() const {
  std::optional<std::chrono::steady_clock::time_point> wake;
  auto at = [&wake](auto when) { wake = std::min(wake.value_or(when), when); };
  for (auto const& record : clients_) {
    // Descendants of the dead are looked for until none is left, and who cannot be seen until he comes back.
    if (record.orphaned() || record.unseen) {
      at(record.look_at);
    }
  }
  auto const* const writer = succession_.writer();
  if (writer != nullptr && writer->left_chunks() > 0) {
    auto const until = static_cast<std::int64_t>(view_.header().left_until_ns.load());
    at(std::chrono::steady_clock::now() +
       std::chrono::nanoseconds{std::max<std::int64_t>(0, until - monotonic_ns())});
  }
  return wake;
}

std::uint64_t kept_pool::untouched_host_bytes() const noexcept {
  auto const shape = view_.shape();
  return shape.backend == backend_kind::host
             ? untouched_bytes(files_.chunks.front().get(), shape.bytes())
             : 0;
}

nlohmann::json kept_pool::users() const {
  auto list = nlohmann::json::array();
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).lives()) {
      list.emplace_back(nlohmann::json::object());
      add_identity(list.back(), clients_.at(slot).who);
    }
  }
  return list;
}

void kept_pool::watch(poll_list& polled) {
  doorbell_at_ = polled.add(succession_.writer() != nullptr ? files_.doorbell.get() : -1);
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto const& record = clients_.at(slot);
    client_at_.at(slot) = {polled.add(record.socket.get()), polled.add(record.process.get()),
                           polled.add(record.life.get())};
  }
}

void kept_pool::serve(poll_list const& polled) {
  if (auto* const writer = succession_.writer(); writer != nullptr && polled.ready(doorbell_at_)) {
    eventfd_t count = 0;
    (void)::eventfd_read(files_.doorbell.get(), &count);
    writer->pump();
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
    if (record.unseen) {
      look_for(slot);
    }
    if (record.orphaned()) {
      finish(slot);
    }
  }
  end_grace();
  succession_.appoint_ready_server();
}

/// No process is seen there, but all that the client was have its lock.
void kept_pool::look_for(std::uint32_t slot) {
  constexpr std::chrono::milliseconds between_looks{100};
  auto& record = clients_.at(slot);
  if (auto const now = std::chrono::steady_clock::now(); now >= record.look_at) {
    record.look_at = now + between_looks;
    if (!posix::is_byte_locked(files_.mailroom.get(), slot)) {
      record.unseen = false;
      client_exited(slot);
    }
  }
}

/// Without a server nobody else lets go of what one has left.
void kept_pool::end_grace() {
  auto* const writer = succession_.writer();
  if (writer != nullptr && writer->left_chunks() > 0 &&
      monotonic_ns() >= static_cast<std::int64_t>(view_.header().left_until_ns.load())) {
    auto const freed = writer->release_left(writer->left_chunks());
    manifest_.clear();
    spdlog::info("no server came for what the last one has left chunks={} pool=\"{}\"", freed,
                 name_of(view_.shape()));
  }
}

void kept_pool::refuse_second_server() const {
  if (auto const other = succession_.server_slot()) {
    // Of a server with an endpoint the client is a process that it starts, and replaces, to compute for it.
    auto const endpoint = readable_text(text_of(view_.clients()[*other].endpoint));
    auto const which =
        endpoint.empty()
            ? " (pid " + std::to_string(clients_.at(*other).who.pid) + "); stop it first"
            : ", which listens at " + endpoint +
                  "; stop it first (`sluice status --json` has its pid)";
    throw error{error_kind::already_exists, "the pool of " + name_of(view_.shape()) +
                                                " already has an inference server" + which +
                                                ", or give this one another --runtime-dir"};
  }
}

void kept_pool::join(unique_fd& socket, message request) {
  auto const& kind = kind_named(field(request.body, "kind", std::string{}));
  bool const serves = kind.kind == client_kind::server;
  if (request.descriptors.empty() || request.descriptors.size() > 2) {
    throw error{error_kind::invalid_argument,
                "a join brings the read end of the client's life pipe, and its pidfd"};
  }
  if (serves) {
    refuse_second_server();
  }
  auto const slot = empty_slot(view_);
  auto const standing = admit(view_, kind, wish_in(request.body));
  // Before anything is changed: whoever cannot be given what he needs is refused.
  auto pidfd = request.descriptors.size() > 1 ? std::move(request.descriptors[1]) : unique_fd{};
  auto record = newcomer(peer_at(socket, request.body, std::move(pidfd)),
                         std::move(request.descriptors.front()));
  auto writers_bell = bell_for_writer(record.bell);
  auto const ledger =
      serves ? reopen_read_write(files_.ledger.get()) : reopen_read_only(files_.ledger.get());
  auto const published =
      serves ? reopen_read_write(files_.manifest.get()) : reopen_read_only(files_.manifest.get());
  seat(slot, socket, std::move(record), kind, request, standing);
  try {
    welcome(clients_.at(slot), slot, files_, ledger, published, copies_.share_of(id(), slot));
  } catch (error const& gone) {
    spdlog::info("a client could not be told of its place pid={} reason=\"{}\"",
                 clients_.at(slot).who.pid, gone.what());
    // If it lives it hears that it has no broker; its life pipe tells the rest.
    clients_.at(slot).socket.reset();
    return;
  }
  succession_.client_came(slot, std::move(writers_bell));
}

/// Writes a newcomer into the ledger, and takes its socket; throws for what its request says wrongly,
/// and then nothing has changed.
void kept_pool::seat(std::uint32_t slot, unique_fd& socket, kept_client record,
                     client_traits const& kind, message const& request,
                     job_standing const& standing) {
  new_client const who{kind.kind,
                       record.who,
                       inode_of(record.life.get()),
                       field(request.body, "name", std::string{}),
                       field(request.body, "endpoint", std::string{}),
                       standing};
  clients_.at(slot) = std::move(record);
  write_client(view_, slot, who);
  clients_.at(slot).present = true;
  clients_.at(slot).socket = std::move(socket);
  users_changed_();
  spdlog::info("a client joins kind={} pid={} slot={} pool=\"{}\"", kind.name, who.process.pid,
               slot, name_of(view_.shape()));
}

/// What the last writer had been asked to take back and did not, the broker takes back.
void kept_pool::become_writer() {
  succession_.broker_takes_over();
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).present && clients_.at(slot).reported) {
      take_back(slot);
      clear_slot(slot);
    }
  }
  succession_.writer()->pump();
}

void kept_pool::rejoin(unique_fd& socket, message request) {
  auto const slot = field(request.body, "slot", max_clients);
  auto const pidfd_at = rejoin_descriptors(request.body);
  auto pidfd = request.descriptors.size() > pidfd_at ? std::move(request.descriptors[pidfd_at])
                                                     : unique_fd{};
  auto from = peer_at(socket, request.body, std::move(pidfd));
  if (slot >= max_clients || !clients_.at(slot).present || !clients_.at(slot).who.is(from.who)) {
    throw error{error_kind::not_found, "the client has no place in the pool that it came back to"};
  }
  bool const ready = field(request.body, "ready", false);
  auto& record = clients_.at(slot);
  auto writers_bell = bell_for_writer(request.descriptors.at(4));
  record.bell = std::move(request.descriptors.at(4));
  record.life = std::move(request.descriptors.at(5));
  record.process = std::move(from.process);
  record.unseen = false;
  record.socket = std::move(socket);
  nlohmann::json rejoined{{"type", "rejoined"}};
  if (auto const why = refusal_of_copies(request, slot)) {
    rejoined["copies_refused"] = *why;
    spdlog::warn("the host copies that a client brings are refused pid={} slot={} reason=\"{}\"",
                 record.who.pid, slot, *why);
  }
  send_message(record.socket.get(), rejoined);
  spdlog::info("a client came back pid={} slot={}", record.who.pid, slot);
  succession_.client_came_back(slot, std::move(writers_bell), ready);
}

/// Their client goes on without them.
std::optional<std::string> kept_pool::refusal_of_copies(message& request, std::uint32_t slot) {
  if (!request.body.contains("copy_holder")) {
    return std::nullopt;
  }
  try {
    constexpr std::size_t of_copies = 6;
    copies_.adopt(copy_files_in(request.descriptors, of_copies, request.body.contains("copy_disk")),
                  id(), slot, field(request.body, "copy_holder", copy_holders));
  } catch (error const& why) {
    return why.what();
  }
  return std::nullopt;
}

void kept_pool::park(nlohmann::json const& question) {
  auto const slot = order_park(view_, question, copies_.describe(id()));
  spdlog::info("an operator has a job parked pid={} slot={} pool=\"{}\"", clients_.at(slot).who.pid,
               slot, name_of(view_.shape()));
  ring(slot);
}

void kept_pool::wake(nlohmann::json const& question) {
  auto const slot = order_wake(view_, question);
  spdlog::info("an operator has a job woken pid={} slot={} pool=\"{}\"", clients_.at(slot).who.pid,
               slot, name_of(view_.shape()));
  ring(slot);
}

void kept_pool::note_use(nlohmann::json const& question) {
  mark_use(view_, question);
}

/// One that has not come back to this broker yet looks by itself.
void kept_pool::ring(std::uint32_t slot) const noexcept {
  if (auto const& bell = clients_.at(slot).bell) {
    (void)::eventfd_write(bell.get(), 1);
  }
}

void kept_pool::read_client(std::uint32_t slot) {
  auto& record = clients_.at(slot);
  try {
    auto const received = receive_message(record.socket.get());
    if (!received) {
      record.socket.reset();  // its process's exit, not this, decides what becomes of its memory
    } else if (received->body["type"] == "reclaimed" && view_.writer_slot() == slot) {
      auto const gone = field(received->body, "slot", max_clients);
      if (gone < max_clients && clients_.at(gone).reported) {
        clear_slot(gone);
      }
    } else if (received->body["type"] == "ready") {
      succession_.hear_ready(slot);
    }
  } catch (error const& why) {
    spdlog::warn("a client's message could not be read pid={} reason=\"{}\"", record.who.pid,
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
  spdlog::info("a client has ended pid={} slot={}", record.who.pid, slot);
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
  if (!record.all_have_ended(view_.clients()[slot].life_inode.load())) {
    return;
  }
  record.life.reset();
  free_copies(slot);
  if (auto* const writer = succession_.writer()) {
    take_back(slot);
    clear_slot(slot);
    writer->pump();
  } else {
    succession_.report_gone(slot);
  }
}

/// What a client held is free, but for what a server has published: that waits for its successor.
void kept_pool::take_back(std::uint32_t slot) {
  auto& writer = *succession_.writer();
  std::uint32_t left = 0;
  if (is_server(view_.clients()[slot]) && server_grace_.count() > 0) {
    auto const grace_ns = std::chrono::nanoseconds{server_grace_}.count();
    left = leave_published(view_, manifest_, writer, slot, monotonic_ns() + grace_ns);
  }
  auto const freed = writer.reclaim(slot);
  spdlog::info("took back what a client held slot={} chunks={} left={} pool=\"{}\"", slot, freed,
               left, name_of(view_.shape()));
}

void kept_pool::free_copies(std::uint32_t slot) {
  if (auto const freed = copies_.sweep(id(), slot); freed > 0) {
    spdlog::info("freed the host copies of a client slot={} copies={}", slot, freed);
  }
}

void kept_pool::clear_slot(std::uint32_t slot) {
  free_copies(slot);  // another client may have brought the table since it ended
  view_.clients()[slot].status.store(static_cast<std::uint32_t>(client_status::empty),
                                     std::memory_order_release);
  clients_.at(slot) = kept_client{};
  users_changed_();
}

}  // namespace sluice::memhandover::detail
