/// The folder in which the processes of a user find their broker, and what lies in it.
///
///   broker.sock   where the broker listens
///   broker.lock   locked while it lives: there is one
///   start.lock    locked by whoever starts one
///   broker.log    what it says
///   pool.json     who uses its pools, for its successor
///   server-0.sock where the server of device 0 tells its status
///   k0-1f2e3d4c   where what keeps an engine of device 0's server meets the next server
///   server-0.experience   what it has learnt of its models, for its successor
///
/// A folder that others could use, or that cannot be one, is refused with the command that mends it.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace sluice::memhandover {

/// The absolute path of `wanted`, else $SLUICE_RUNTIME_DIR, else $XDG_RUNTIME_DIR/sluice, else
/// /tmp/sluice-<uid>. Throws `invalid_argument` for what is there and is no folder of this user's with mode
/// 0700; what is not there may come to be.
[[nodiscard]] std::string check_runtime_dir(std::string const& wanted);

/// The same, created with mode 0700 if it is missing. Throws `invalid_argument` if it cannot be.
[[nodiscard]] std::string prepare_runtime_dir(std::string const& wanted);

/// The process that has the folder's broker.lock; nothing if none has, or none that this process can see.
[[nodiscard]] std::optional<pid_t> holder_of_broker_lock(std::string const& runtime_dir);

/// Where the server of a device's pool tells its status, in the folder that check_runtime_dir finds.
[[nodiscard]] std::string status_socket_of(std::string const& runtime_dir, int device);

/// Where the server of a device's pool keeps what it has learnt of its models, likewise.
[[nodiscard]] std::string server_experience_of(std::string const& runtime_dir, int device);

/// What to say where a broker has the folder and cannot be reached there.
[[nodiscard]] std::string unreachable_broker(std::string const& runtime_dir, pid_t broker);

}  // namespace sluice::memhandover
