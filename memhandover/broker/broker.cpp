#include "memhandover/broker/broker.hpp"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "memhandover/base/system_error.hpp"
#include "memhandover/broker/conversation.hpp"
#include "memhandover/broker/detail/open_files.hpp"
#include "memhandover/device/host_room.hpp"
#include "memhandover/ledger/address_story.hpp"
#include "memhandover/ledger/pool_status.hpp"

namespace sluice::memhandover {
namespace {

using json = nlohmann::json;

void check_version(json const& body) {
  if (field(body, "version", 0) != protocol_version) {
    throw error{error_kind::unsupported,
                "the broker speaks version " + std::to_string(protocol_version) +
                    " of the pool's protocol; end the programs that use the pool, and it with "
                    "`kill " +
                    std::to_string(::getpid()) +
                    "`, and start them again with one installation of Sluice"};
  }
}

void refuse(unique_fd const& socket, error const& why) {
  try {
    send_message(socket.get(), refusal(why));
  } catch (error const&) {
    // Gone as well; there is nobody left to tell.
  }
}

}  // namespace

broker::broker(options how)
    : options_(std::move(how)), place_(options_.runtime_dir), spare_(duplicate(place_.listener())) {
  pools_.emplace(detail::pool_set::options{options_.runtime_dir, options_.pools, options_.idle_exit,
                                           options_.adoption_grace, options_.server_grace,
                                           options_.host_copy_bytes, options_.host_copy_disk});
  idle_since_ = clock::now();
}

bool broker::idle() const {
  return visitors_.empty() && pools_->idle();
}

std::chrono::milliseconds broker::patience() const {
  return visited_ ? options_.idle_exit : std::max(options_.idle_exit, options_.first_visit);
}

bool broker::kept_by_visitor(detail::kept_pool const& pool) const {
  return std::any_of(visitors_.begin(), visitors_.end(),
                     [&](auto const& who) { return who->keeps == pool.id(); });
}

void broker::run(int stop_fd) {
  for (;;) {
    poll_list polled;
    auto const stop_at = polled.add(stop_fd);
    auto const listener_at = polled.add(place_.listener());
    auto const folder_at = polled.add(place_.watch());
    std::vector<std::size_t> visitor_at;
    visitor_at.reserve(visitors_.size());
    for (auto const& who : visitors_) {
      visitor_at.push_back(polled.add(who->deferred ? -1 : who->socket.get()));
    }
    pools_->watch(polled);
    auto wake = pools_->wake_at();
    if (idle()) {
      wake = std::min(wake.value_or(clock::time_point::max()), idle_since_ + patience());
    }
    if (auto const look = place_.look_at()) {
      wake = std::min(wake.value_or(clock::time_point::max()), *look);
    }
    polled.wait(wake);
    if (polled.ready(stop_at)) {
      return;
    }
    pools_->serve(polled);
    std::vector<bool> ready;
    ready.reserve(visitor_at.size());
    for (auto const at : visitor_at) {
      ready.push_back(polled.ready(at));
    }
    serve_visitors(ready);
    if (polled.ready(listener_at)) {
      accept_visitor();
    }
    if (polled.ready(folder_at)) {
      place_.hear();
    }
    if (!keep_place()) {
      spdlog::info("the runtime folder has gone and nobody needs a pool; the broker ends");
      return;
    }
    pools_->give_idle_back([this](auto const& pool) { return kept_by_visitor(pool); });
    if (!idle()) {
      idle_since_ = clock::now();
    } else if (clock::now() - idle_since_ >= patience()) {
      accept_visitor();  // who came since the last look would find his connection closed
      if (visitors_.empty()) {
        spdlog::info("nobody needs a pool any more; the broker ends");
        return;
      }
    }
  }
}

bool broker::keep_place() {
  if (!place_.look_at() || clock::now() < *place_.look_at()) {
    return true;
  }
  if (idle() && place_.folder_is_gone()) {
    return false;
  }
  accept_visitor();  // who came by the name that has gone
  if (place_.look()) {
    pools_->write_roster();
  }
  return true;
}

void broker::serve_visitors(std::vector<bool> const& ready) {
  for (std::size_t i = 0; i < ready.size(); ++i) {
    if (ready[i] && !serve(*visitors_[i])) {
      visitors_[i].reset();
    }
  }
  for (auto& who : visitors_) {
    if (who && who->deferred) {
      auto request = std::move(*who->deferred);
      who->deferred.reset();
      if (!handle(*who, std::move(request))) {
        who.reset();
      }
    }
  }
  std::erase(visitors_, nullptr);
  pools_->forget_attempts();
}

void broker::accept_visitor() {
  unique_fd socket{::accept4(place_.listener(), nullptr, nullptr, SOCK_CLOEXEC)};
  if (!socket) {
    if (errno == EMFILE || errno == ENFILE) {
      turn_away();
    }
    return;
  }
  if (peer_uid(socket.get()) != ::geteuid()) {
    spdlog::warn("refused a connection of another user uid={}", peer_uid(socket.get()));
    return;
  }
  visitors_.push_back(std::make_unique<visitor>());
  visitors_.back()->socket = std::move(socket);
  visited_ = true;
}

/// Else he would wait for an answer, and the listener would be ready for ever.
void broker::turn_away() {
  auto const why = errno == EMFILE ? detail::too_few_open_files()
                                   : system_error("the broker cannot take another connection");
  spare_.reset();
  unique_fd const socket{::accept4(place_.listener(), nullptr, nullptr, SOCK_CLOEXEC)};
  if (socket) {
    spdlog::warn("a connection was refused reason=\"{}\"", why.what());
    refuse(socket, why);
  }
  spare_ = duplicate(place_.listener());
}

bool broker::serve(visitor& who) {
  try {
    auto request = receive_what_came(who.socket.get());
    if (request && request->lost_descriptors) {
      throw detail::too_few_open_files();
    }
    return request && handle(who, std::move(*request));
  } catch (error const& why) {
    spdlog::info("a connection ends reason=\"{}\"", why.what());
    refuse(who.socket, why);
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
    if (pools_->resolved()) {
      return answer(who, request);
    }
    who.deferred = std::move(request);  // answered once it is known which pools there are
    return true;
  } catch (error const& why) {
    refuse(who.socket, why);
    return false;
  }
}

bool broker::answer(visitor& who, message& request) {
  auto const type = request.body["type"].get<std::string>();
  json body{{"type", type}};
  if (type == "pools") {
    body["pools"] = pools_->list();
  } else if (type == "status") {
    auto const& pool = pools_->asked_about(request.body);
    body.update(describe_pool(pool.view()));
    auto const why = pool.untouched_host_bytes() > 0
                         ? shortage(pools_->untouched_host_bytes(), read_host_room())
                         : std::nullopt;
    body["pool"]["warning"] = why ? json(*why) : json{};
    body["pool"]["host_copies"] = pools_->copies().describe(pool.id());
  } else if (type == "show") {
    constexpr std::size_t runs_of_a_message = 500;
    body.update(describe_chunks(pools_->asked_about(request.body).view(),
                                field(request.body, "from", std::uint32_t{0}), runs_of_a_message));
  } else if (type == "address") {
    auto const& pool = pools_->asked_about(request.body);
    auto const shape = pool.view().shape();
    body.update(describe_address(pool.view(), field(request.body, "address", std::uint64_t{0}),
                                 field(request.body, "pid", std::uint32_t{0})));
    body["pool"] = {{"id", hexadecimal(pool.id())},
                    {"backend", to_string(shape.backend)},
                    {"device", shape.device}};
  } else if (type == "park") {
    pools_->asked_about(request.body).park(request.body);
  } else if (type == "wake") {
    pools_->asked_about(request.body).wake(request.body);
  } else if (type == "use") {
    pools_->asked_about(request.body).note_use(request.body);
  } else if (type == "open" || type == "join") {
    check_version(request.body);
    auto* const pool = pools_->find_or_begin(request.body);
    if (pool == nullptr) {
      who.deferred = std::move(request);
      return true;
    }
    if (type == "join") {
      detail::require_room_for_another();
      pool->join(who.socket, std::move(request));
      return false;  // the connection is the client's now
    }
    auto const shape = pool->view().shape();
    who.keeps = pool->id();
    body.update({{"backend", to_string(shape.backend)}, {"device", shape.device}});
  } else {
    throw error{error_kind::invalid_argument, "the broker knows no message of type " + type};
  }
  send_message(who.socket.get(), body);
  return true;
}

bool broker::rejoin(visitor& who, message request) {
  auto const expected = rejoin_descriptors(request.body);
  if (field(request.body, "version", 0) != protocol_version ||
      request.descriptors.size() < expected || request.descriptors.size() > expected + 1) {
    throw error{
        error_kind::invalid_argument,
        "a rejoin must name this protocol's version and bring six descriptors, two or three more "
        "of host copies, and a pidfd"};
  }
  auto* const pool = pools_->find(field(request.body, "pool_id", std::uint64_t{0}));
  if (pool == nullptr) {
    send_message(who.socket.get(), {{"type", "send_chunks"}});
    who.adopting = std::move(request);
    return true;
  }
  pool->rejoin(who.socket, std::move(request));
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
  if (pools_->find(field(first.body, "pool_id", std::uint64_t{0})) == nullptr) {
    pool_files files;
    files.ledger = reopen_read_write(first.descriptors.at(0).get());
    files.mailroom = duplicate(first.descriptors.at(1).get());
    files.manifest = reopen_read_write(first.descriptors.at(2).get());
    files.doorbell = duplicate(first.descriptors.at(3).get());
    files.chunks = std::move(who.chunks);
    pools_->adopt(std::move(files));
    spdlog::info("adopted a pool of an earlier broker");
  }
  return rejoin(who, std::move(first));
}

}  // namespace sluice::memhandover
