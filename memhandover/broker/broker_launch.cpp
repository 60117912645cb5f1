#include "memhandover/broker/broker_launch.hpp"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/descriptor_limit.hpp"
#include "memhandover/base/environment.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/numbers.hpp"
#include "memhandover/base/shared_text.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/broker/broker.hpp"
#include "memhandover/broker/conversation.hpp"
#include "memhandover/broker/detail/broker_start.hpp"
#include "memhandover/broker/detail/open_files.hpp"
#include "memhandover/broker/runtime_folder.hpp"

namespace sluice::memhandover {
namespace {

using clock = std::chrono::steady_clock;

/// How long a broker is waited for that does not listen any more and has not ended.
constexpr std::chrono::seconds ending_patience{10};
constexpr std::chrono::milliseconds between_looks{5};

/// A number of `unit` that a variable sets. Throws `invalid_argument` if it is set to none.
std::int64_t number_of(char const* name, std::int64_t otherwise, char const* unit,
                       std::int64_t most) {
  auto const text = environment(name);
  if (text.empty()) {
    return otherwise;
  }
  auto const count = parse_number<std::int64_t>(text);
  if (!count || *count < 0 || *count > most) {
    throw error{error_kind::invalid_argument, std::string{name} + " is " + readable_text(text) +
                                                  ", must be a number of " + unit + ", at most " +
                                                  std::to_string(most)};
  }
  return *count;
}

std::chrono::milliseconds milliseconds_in(char const* name, std::chrono::milliseconds otherwise) {
  constexpr std::int64_t a_week = 7LL * 24 * 3600 * 1000;
  return std::chrono::milliseconds{number_of(name, otherwise.count(), "milliseconds", a_week)};
}

constexpr std::int64_t a_pebibyte = 1LL << 50U;

/// Who starts a broker in place of one that has ended may know of it by the environment alone.
std::uint64_t host_copy_bytes_of(broker_options const& options) {
  return options.host_copy_bytes != 0 ? options.host_copy_bytes
                                      : static_cast<std::uint64_t>(number_of(
                                            "SLUICE_HOST_COPY_BYTES", 0, "bytes", a_pebibyte));
}

disk_wish host_copy_disk_of(broker_options const& options) {
  auto wanted = options.host_copy_disk;
  if (wanted.bytes == 0) {
    wanted = {environment("SLUICE_HOST_COPY_DISK_PATH"),
              static_cast<std::uint64_t>(
                  number_of("SLUICE_HOST_COPY_DISK_BYTES", 0, "bytes", a_pebibyte))};
  }
  if (wanted.bytes > 0 && wanted.folder.empty()) {
    throw error{error_kind::invalid_argument,
                "host copies are to have " + format_bytes(wanted.bytes) +
                    " on disk, but no folder is named; name one on a disk (--host-disk-path of "
                    "`sluice run`, host_copies.disk_path of the policy, "
                    "SLUICE_HOST_COPY_DISK_PATH)"};
  }
  if (wanted.bytes > 0 && host_copy_bytes_of(options) == 0) {
    throw error{error_kind::invalid_argument,
                "host copies are to have " + format_bytes(wanted.bytes) +
                    " on disk, but none in memory, which are used first; give them memory as well "
                    "(--host-memory of `sluice run`, host_copies.memory of the policy, "
                    "SLUICE_HOST_COPY_BYTES)"};
  }
  return wanted;
}

/// The lock of whoever starts a broker. Waits for one who does, who is done in a minute at most. The constructor throws `unavailable`.
class start_lock {
 public:
  explicit start_lock(std::string const& runtime_dir) {
    auto const file = runtime_dir + "/start.lock";
    lock_ = beside_standard_streams(
        unique_fd{::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)});
    if (!lock_ && errno == EISDIR) {
      throw error{error_kind::unavailable,
                  file + " is a folder; remove it with `rm -r " + shell_word(file) + "`"};
    }
    if (!lock_) {
      throw error{error_kind::unavailable,
                  "cannot write in the runtime folder " + runtime_dir + ": " + reason_of(errno) +
                      "; name a folder that you can write with --runtime-dir"};
    }
    while (::flock(lock_.get(), LOCK_EX) != 0) {
      if (errno != EINTR) {
        throw system_error("cannot lock " + file);
      }
    }
  }
  start_lock(start_lock const&) = delete;
  start_lock& operator=(start_lock const&) = delete;
  /// Closing would not do: children that were forked meanwhile have it open, too.
  ~start_lock() { (void)::flock(lock_.get(), LOCK_UN); }

 private:
  unique_fd lock_;
};

void say(int ready_fd, std::string const& text) {
  if (ready_fd >= 0) {
    (void)!::write(ready_fd, text.data(), text.size());
    ::close(ready_fd);
  }
}

}  // namespace

unique_fd ensure_broker(broker_options const& options) {
  auto const runtime_dir = prepare_runtime_dir(options.runtime_dir);
  if (auto socket = connect_to_broker(runtime_dir)) {
    return std::move(*socket);
  }
  start_lock const lock{runtime_dir};
  if (auto socket = connect_to_broker(runtime_dir)) {
    return std::move(*socket);
  }
  auto const patience_ends = clock::now() + ending_patience;
  for (;;) {
    bool started = true;
    try {
      detail::start_broker(options, runtime_dir);
    } catch (error const& why) {
      started = why.kind() != error_kind::already_exists;
      if (started) {
        throw;
      }
      if (clock::now() > patience_ends) {
        auto const holder = holder_of_broker_lock(runtime_dir);
        throw error{error_kind::unavailable,
                    holder ? unreachable_broker(runtime_dir, *holder) : why.what()};
      }
    }
    if (auto socket = connect_to_broker(runtime_dir)) {
      return std::move(*socket);
    }
    if (started && clock::now() > patience_ends) {
      throw error{error_kind::unavailable,
                  "the broker ends as soon as it is ready; see " + runtime_dir + "/broker.log"};
    }
    // One that nobody uses ends after a while, which may be over before this process goes on; and an earlier one that does not listen
    // any more has its place until its process has ended.
    std::this_thread::sleep_for(between_looks);
  }
}

pool_presence open_pool(broker_options const& options) {
  auto begun = ask_broker(options, wish_message("open", options), "open");
  auto const& opened = begun.answer.body;
  pool_presence presence{std::move(begun.connection), backend_kind::host, 0};
  presence.backend = field(opened, "backend", std::string{}) == to_string(backend_kind::cuda)
                         ? backend_kind::cuda
                         : backend_kind::host;
  presence.device = field(opened, "device", 0);
  return presence;
}

int broker_main(broker_options const& options, int ready_fd) {
  if (ready_fd >= 0) {
    ::fcntl(ready_fd, F_SETFD, FD_CLOEXEC);
  }
  sigset_t stop_signals;
  ::sigemptyset(&stop_signals);
  ::sigaddset(&stop_signals, SIGTERM);
  ::sigaddset(&stop_signals, SIGINT);
  ::sigprocmask(SIG_BLOCK, &stop_signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGCHLD, SIG_IGN);  // those who create chunks are not waited for
  ::signal(SIGHUP, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // what is larger than a file may be is an error of its call
  try {
    // Nobody's child: whoever started it neither waits for it nor ends it.
    if (auto const child = ready_fd >= 0 ? ::fork() : 0; child > 0) {
      ::_exit(0);
    } else if (child < 0) {
      throw system_error("cannot start a process");
    }
    raise_descriptor_limit();
    detail::require_open_files();
    unique_fd const stop{::signalfd(-1, &stop_signals, SFD_CLOEXEC)};
    broker::options how;
    how.runtime_dir = prepare_runtime_dir(options.runtime_dir);
    how.idle_exit = milliseconds_in("SLUICE_BROKER_IDLE_EXIT_MS", how.idle_exit);
    how.server_grace = milliseconds_in("SLUICE_SERVER_GRACE_MS", how.server_grace);
    how.pools = {options.backend, options.device.value_or(0), options.pool_bytes,
                 options.chunk_bytes};
    how.host_copy_bytes = host_copy_bytes_of(options);
    how.host_copy_disk = host_copy_disk_of(options);
    broker serving{how};
    say(ready_fd, "ok\n");
    serving.run(stop.get());
    return 0;
  } catch (error const& why) {
    say(ready_fd, std::to_string(static_cast<int>(why.kind())) + " " + why.what());
    spdlog::error("the broker cannot go on reason=\"{}\"", why.what());
    return 1;
  } catch (std::exception const& why) {
    say(ready_fd, std::to_string(static_cast<int>(error_kind::internal)) + " " + why.what());
    spdlog::error("the broker cannot go on reason=\"{}\"", why.what());
    return 1;
  }
}

}  // namespace sluice::memhandover
