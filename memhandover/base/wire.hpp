/// The conversation between broker and clients, and between a server and its executor: JSON messages with
/// descriptors and bytes beside them, over a Unix socket of type SOCK_SEQPACKET, so that a message arrives whole
/// or not at all.
///
///   client → broker   {"type": "join", …}  then  {"type": "joined", …} + descriptors
///
/// A message carries at most `max_descriptors` descriptors; the chunk descriptors of a large pool
/// go in several messages. All descriptors received are close-on-exec, and none of the standard streams.
#pragma once

#include <sys/un.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::memhandover {

inline constexpr std::size_t max_descriptors = 200;  // the kernel takes 253 a message
/// The bytes beside a short text; more travel in a file of their own, whose descriptor is sent.
inline constexpr std::size_t max_bytes_beside = 64U << 10U;
inline constexpr int protocol_version = 8;

struct message {
  nlohmann::json body;
  std::vector<unique_fd> descriptors;
  std::vector<std::byte> bytes{};
  bool lost_descriptors = false;  ///< some that came with it could not be opened here
  char form = 0;                  ///< of a plain one (`try_send_plain`): it has no `body`
};

/// Sends one message; bytes of a text that are not UTF-8 arrive as U+FFFD. Throws `unavailable` if
/// the peer is gone or has not taken anything for a while, `internal` for more text or descriptors than
/// a message carries.
void send_message(int socket, nlohmann::json const& body, std::vector<int> const& descriptors = {},
                  std::span<std::byte const> bytes = {});
/// As above, but false where the peer has to take something first.
[[nodiscard]] bool try_send_message(int socket, nlohmann::json const& body,
                                    std::vector<int> const& descriptors = {},
                                    std::span<std::byte const> bytes = {});

/// As above, of a message that is no JSON: these parts one after the other, of which the first begins with a byte that is its form,
/// 1 to 31. Whoever receives it has that byte in `bytes`, too, and knows what it means.
[[nodiscard]] bool try_send_plain(int socket, std::span<std::span<std::byte const> const> parts,
                                  std::vector<int> const& descriptors = {});

/// Sends a pool's chunk descriptors, in as many messages of type "chunks" as they need.
void send_chunks(int socket, std::span<unique_fd const> chunks);

/// Receives one message; nothing at the end of the conversation. Blocks unless the socket does not.
/// Throws `invalid_argument` for something that is no message of ours, `unavailable` for a broken
/// connection or, with `timeout_ms` ≥ 0, if nothing came in time.
[[nodiscard]] std::optional<message> receive_message(int socket, int timeout_ms = -1);
/// As above, for who can do with a message that has lost its descriptors, as this process may open no more
/// files; `receive_message` throws `unavailable` then.
[[nodiscard]] std::optional<message> receive_what_came(int socket);
/// As above, plain ones too, which the others refuse.
struct arrival {
  std::optional<message>
      received;  ///< nothing at the end of the conversation, or where nothing has come
  bool has_ended = false;
};
[[nodiscard]] arrival receive_any(int socket);
/// Does not wait.
[[nodiscard]] arrival receive_if_there(int socket);

/// Where the broker of that folder listens. Throws `invalid_argument` if its path is too long for a socket.
[[nodiscard]] sockaddr_un broker_address(std::string const& runtime_dir);

/// Connects to the broker in that folder (runtime_folder.hpp); nothing if none listens. Throws `unavailable`
/// if it cannot be reached, `invalid_argument` if it is another user's.
[[nodiscard]] std::optional<unique_fd> connect_to_broker(std::string const& runtime_dir);

/// User id of the process at the other end of a connected Unix socket.
[[nodiscard]] unsigned peer_uid(int socket);
/// Its process id; 0 if it is in a namespace of pids that this process does not see into.
[[nodiscard]] int peer_pid(int socket);

/// Start time of a process in clock ticks since boot, 0 if there is none: with the pid it names a
/// process for good.
[[nodiscard]] std::uint64_t process_start_ticks(int pid);

}  // namespace sluice::memhandover
