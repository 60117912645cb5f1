#include "memhandover/client/membership.hpp"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <tuple>

#include "memhandover/base/descriptor_limit.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/processes.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/waiting.hpp"
#include "memhandover/broker/conversation.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "posix/byte_locks.hpp"

namespace sluice::memhandover {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// From an attempt to find a broker that has failed to the next.
constexpr milliseconds attempts_apart{200};

}  // namespace

membership::membership(broker_options broker, client_kind kind, std::string const& name,
                       std::string const& endpoint, job_wish const& wish)
    : broker_(std::move(broker)) {
  std::tie(life_read_, life_write_) = make_pipe("the broker to see when this process ends");
  auto join = wish_message("join", broker_);
  join["kind"] = traits_of(kind).name;
  join["name"] = name;
  join["endpoint"] = endpoint;
  add_wish(join, wish);
  add_identity(join, this_process());
  auto const itself = own_pidfd();
  std::vector<int> brought{life_read_.get()};
  if (itself) {
    brought.push_back(itself.get());
  }
  auto begun = ask_broker(broker_, join, "joined", brought);
  socket_ = std::move(begun.connection);
  auto joined = std::move(begun.answer);
  constexpr std::size_t of_the_pool = 5;
  bool const has_copies = joined.body.contains("host_copies");
  auto const of_copies = std::size_t{has_copies ? 2U : 0U} +
                         (has_copies && joined.body["host_copies"].contains("disk_bytes") ? 1 : 0);
  if (joined.descriptors.size() != of_the_pool + of_copies) {
    throw error{error_kind::internal,
                "the broker's answer came without its five descriptors, or those of host copies"};
  }
  slot_ = joined.body.at("slot").get<std::uint32_t>();
  if (slot_ >= max_clients) {
    throw error{error_kind::internal, "the broker's answer names slot " + std::to_string(slot_) +
                                          ", but there are " + std::to_string(max_clients)};
  }
  files_.ledger = std::move(joined.descriptors[0]);
  files_.mailroom = std::move(joined.descriptors[1]);
  files_.manifest = std::move(joined.descriptors[2]);
  files_.doorbell = std::move(joined.descriptors[3]);
  bell_ = std::move(joined.descriptors[4]);
  if (has_copies) {
    map_copies(copy_files_in(joined.descriptors, of_the_pool, of_copies > 2),
               joined.body["host_copies"]);
  }
  lock_place();
  auto const expected = joined.body.at("chunk_descriptors").get<std::size_t>();
  make_room_for_descriptors(expected);
  while (files_.chunks.size() < expected) {
    auto batch = expect(socket_.get(), "chunks");
    std::move(batch.descriptors.begin(), batch.descriptors.end(),
              std::back_inserter(files_.chunks));
  }
  auto const access = kind == client_kind::server ? shared_segment::access::read_write
                                                  : shared_segment::access::read_only;
  view_.emplace(files_.ledger.get(), files_.mailroom.get(), access);
}

/// Damaged ones, or such as there is no room for in the address space, are no reason not to join.
void membership::map_copies(host_copy_files files, nlohmann::json const& said) {
  try {
    copies_ = std::make_unique<host_copy_share>(std::move(files), said);
    copies_known_.store(true);
  } catch (error const& why) {
    spdlog::warn("this process goes on without host copies reason=\"{}\"", why.what());
  }
}

/// By this a broker in another namespace of pids sees that somebody is here. What is left of the slot's last owner may
/// still be about to close its own.
void membership::lock_place() {
  constexpr std::chrono::seconds at_most{1};
  life_lock_ = beside_standard_streams(reopen_read_write(files_.mailroom.get()));
  auto const until = steady_clock::now() + at_most;
  while (!posix::lock_byte(life_lock_.get(), slot_) && steady_clock::now() < until) {
    std::this_thread::yield();
  }
}

std::optional<message> membership::receive() {
  try {
    if (auto received = receive_message(socket_.get())) {
      return received;
    }
  } catch (error const&) {
    // Treated like the end of the conversation: what it says could not be trusted.
  }
  socket_.reset();
  return std::nullopt;
}

void membership::send(nlohmann::json const& body) {
  if (!socket_) {
    return;
  }
  try {
    send_message(socket_.get(), body);
  } catch (error const&) {
    socket_.reset();
  }
}

void membership::say_ready() {
  ready_ = true;
  send({{"type", "ready"}});
}

membership::~membership() {
  if (attempt_) {
    attempt_->thread.join();
  }
}

std::optional<milliseconds> membership::patience() const {
  if (socket_ || attempt_) {
    return std::nullopt;
  }
  return std::max(milliseconds{0}, ceil<milliseconds>(next_attempt_ - steady_clock::now()));
}

bool membership::reconnect() {
  if (!attempt_) {
    if (steady_clock::now() < next_attempt_) {
      return false;
    }
    try {
      attempt_ = std::make_unique<attempt>(ready_);
      attempt_->thread = std::thread{[this, &under_way = *attempt_] {
        find_broker(under_way);
        (void)::eventfd_write(under_way.done.get(), 1);
      }};
    } catch (std::exception const&) {
      attempt_.reset();  // no descriptor or no thread is to be had at the moment
      next_attempt_ = steady_clock::now() + attempts_apart;
    }
    return false;
  }
  if (!is_ready(attempt_->done.get(), POLLIN)) {
    return false;
  }
  attempt_->thread.join();
  socket_ = std::move(attempt_->socket);
  bool const announced = attempt_->ready;
  if (socket_) {
    hear_of_copies(attempt_->copies_refused);
  }
  attempt_.reset();
  if (!socket_) {
    next_attempt_ = steady_clock::now() + attempts_apart;
  }
  if (ready_ && !announced) {
    say_ready();
  }
  return static_cast<bool>(socket_);
}

/// What lies in those that were refused stays there.
void membership::hear_of_copies(std::string const& refused) {
  copies_known_.store(copies_ != nullptr && refused.empty());
  if (!refused.empty()) {
    spdlog::warn(
        "the broker does not count with the host copies of this process, which takes no more of "
        "them reason=\"{}\"",
        refused);
  }
}

std::optional<message> membership::attend(bool has_news) {
  if (!socket_) {
    if (reconnect()) {
      spdlog::info("back with a broker");
    }
    return std::nullopt;
  }
  if (!has_news) {
    return std::nullopt;
  }
  auto received = receive();
  if (!received) {
    spdlog::warn("the broker has gone; looking for another");
  }
  return received;
}

/// Leaves in it a connection in which this process has its place again, or none. Uses only what
/// is constant after the join.
void membership::find_broker(attempt& under_way) const {
  try {
    auto socket = ensure_broker(broker_);
    nlohmann::json rejoin{{"type", "rejoin"},
                          {"version", protocol_version},
                          {"pool_id", view_->header().pool_id},
                          {"slot", slot_},
                          {"ready", under_way.ready},
                          {"chunk_descriptors", files_.chunks.size()}};
    add_identity(rejoin, this_process());
    std::vector<int> brought{files_.ledger.get(),   files_.mailroom.get(), files_.manifest.get(),
                             files_.doorbell.get(), bell_.get(),           life_read_.get()};
    if (copies_) {
      rejoin["copy_holder"] = copies_->holder();
      auto const& files = copies_->files();
      brought.insert(brought.end(), {files.bytes.get(), files.table.get()});
      if (files.disk) {
        rejoin["copy_disk"] = true;
        brought.push_back(files.disk.get());
      }
    }
    auto const itself = own_pidfd();
    if (itself) {
      brought.push_back(itself.get());
    }
    send_message(socket.get(), rejoin, brought);
    auto answer = receive_message(socket.get(), answer_timeout_ms);
    if (answer && answer->body["type"] == "send_chunks") {
      send_chunks(socket.get(), files_.chunks);
      answer = receive_message(socket.get(), answer_timeout_ms);
    }
    if (answer && answer->body["type"] == "rejoined") {
      under_way.copies_refused = field(answer->body, "copies_refused", std::string{});
      under_way.socket = std::move(socket);
    }
  } catch (std::exception const&) {
    // Another attempt follows.
  }
}

}  // namespace sluice::memhandover
