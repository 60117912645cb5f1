#include "memhandover/broker/detail/kept_client.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/base/processes.hpp"
#include "memhandover/base/waiting.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/broker/conversation.hpp"

namespace sluice::memhandover::detail {

bool kept_client::alone() const {
  return life && is_ready(life.get(), 0);  // nobody writes into it: it can only be hung up
}

int kept_client::end_descendants(std::uint64_t pipe_inode) {
  int const found = end_holders(pipe_inode);
  look_at = std::chrono::steady_clock::now() + look_every;
  if (life) {
    look_every = std::min(2 * look_every, std::chrono::milliseconds{100});
  }
  return found;
}

bool kept_client::all_have_ended(std::uint64_t pipe_inode) {
  if (life && alone()) {
    return true;
  }
  // One may have been forked while the last look was taken.
  bool const look = std::chrono::steady_clock::now() >= look_at;
  bool const none_found = look && end_descendants(pipe_inode) == 0;
  return none_found && !life;
}

peer peer_at(unique_fd const& socket, nlohmann::json const& request, unique_fd pidfd) {
  auto const seen = peer_pid(socket.get());
  auto said = identity_in(request);
  if (said.pid != 0 && !is_foreign(said) && said.pid != seen) {
    throw error{error_kind::invalid_argument, "a client says that it is process " +
                                                  std::to_string(said.pid) + ", and is " +
                                                  std::to_string(seen)};
  }
  if (pidfd && !is_pidfd(pidfd.get())) {
    throw error{error_kind::invalid_argument, "a client sends something else than its pidfd"};
  }
  peer found{said.pid != 0 ? said : identity_of(seen), std::move(pidfd)};
  if (!found.process) {
    if (seen == 0) {
      throw error{
          error_kind::unavailable,
          "the client is in another namespace of pids than the broker and cannot be watched; "
          "let it call pidfd_open (its seccomp profile), or give both one namespace"};
    }
    found.process = open_process(seen, process_start_ticks(seen));
  }
  if (!found.process || is_ready(found.process.get(), POLLIN)) {
    throw error{error_kind::unavailable, "the client that wanted to join has already ended"};
  }
  return found;
}

kept_client newcomer(peer from, unique_fd life) {
  kept_client record;
  record.who = from.who;
  record.process = std::move(from.process);
  record.life = std::move(life);
  record.bell = unique_fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!record.bell) {
    throw error{error_kind::unavailable,
                std::string{"cannot create a bell: "} + std::strerror(errno)};
  }
  return record;
}

unique_fd bell_for_writer(unique_fd const& bell) {
  auto second = duplicate(bell.get());
  if (!second) {
    throw error{error_kind::unavailable,
                std::string{"cannot open a client's bell again: "} + std::strerror(errno)};
  }
  return second;
}

void welcome(kept_client const& who, std::uint32_t slot, pool_files const& files,
             unique_fd const& ledger, unique_fd const& published,
             std::optional<copy_share> const& copies) {
  nlohmann::json joined{
      {"type", "joined"}, {"slot", slot}, {"chunk_descriptors", files.chunks.size()}};
  std::vector<int> descriptors{ledger.get(), files.mailroom.get(), published.get(),
                               files.doorbell.get(), who.bell.get()};
  if (copies) {
    joined["host_copies"] = {
        {"bytes", copies->bytes}, {"slot_bytes", copies->slot_bytes}, {"holder", copies->holder}};
    descriptors.insert(descriptors.end(), {copies->bytes_fd, copies->table_fd});
    if (copies->disk_bytes > 0) {
      joined["host_copies"]["disk_bytes"] = copies->disk_bytes;
      descriptors.push_back(copies->disk_fd);
    }
  }
  send_message(who.socket.get(), joined, descriptors);
  send_chunks(who.socket.get(), files.chunks);
}

}  // namespace sluice::memhandover::detail
