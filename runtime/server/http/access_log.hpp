/// One line for each request of the endpoint, to standard error or a file:
///
///   2030-01-31T12:00:00.000000Z info sluice-server[4711] request peer=127.0.0.1:5000 method=POST …
///
/// A thread of its own writes: an answer never waits for a disk. Lines that come faster than it writes, beyond `most_waiting`, are
/// dropped and counted in a line. A file that has been moved away, as by logrotate, is opened again. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

/// What is known of one request; nothing of what it carried.
struct access_entry {
  std::string peer, method, path;
  std::string model, version;
  std::string id;            ///< of the request: its own, else its X-Request-Id
  unsigned status = 0;       ///< 0: it was not answered
  std::string_view cause{};  ///< why it failed: one word of the program's own; empty: it did not
  std::uint64_t bytes_in = 0, bytes_out = 0;  ///< of the bodies
  std::chrono::steady_clock::time_point begin;
  std::chrono::nanoseconds total{};
  std::optional<request_times> times = std::nullopt;
};

/// Throws what an `access_log` of that target would, and makes no file.
void check_access_log(std::string const& target);

/// Without a line's end. Texts of clients are quoted and cut.
[[nodiscard]] std::string line_of(access_entry const& entry);

class access_log {
 public:
  static constexpr std::size_t most_waiting = 8192;

  /// "stderr", or the path of a file, which is made if it is not there, or of a pipe that somebody reads. Throws
  /// `invalid_argument` if it cannot be written.
  explicit access_log(std::string target);
  /// Writes what is left, unless it is a pipe's and who reads that takes nothing for 3 s.
  ~access_log();
  access_log(access_log const&) = delete;
  access_log& operator=(access_log const&) = delete;
  access_log(access_log&&) = delete;
  access_log& operator=(access_log&&) = delete;

  void write(access_entry entry);

 private:
  struct timed {
    std::chrono::system_clock::time_point at;
    access_entry entry;
  };
  void work();
  void open();
  void open_if_moved();
  /// How many of the lines it could not write, which is logged.
  [[nodiscard]] std::uint64_t append(std::string_view lines);
  [[nodiscard]] bool ends_in_a_cut_line() const;
  [[nodiscard]] bool await_room();

  std::string const target_;
  std::string const program_;
  memhandover::unique_fd file_;                         // of the thread
  std::chrono::steady_clock::time_point complained_{};  // of the thread
  bool was_cut_ = false;  // of the thread: of the last line a part was written

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<timed> waiting_;  // under mutex_
  std::uint64_t dropped_ = 0;   // under mutex_
  bool is_ending_ = false;      // under mutex_
  std::thread thread_;
};

}  // namespace sluice::server
