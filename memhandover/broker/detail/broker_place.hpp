/// The place of a broker in its runtime folder: the lock by which it is the only one, and the socket by
/// which it is found. What others remove of them (a cleaner of /tmp, `rm -r`) is put right:
///
///   held ──something has gone──► torn ──look()──► held
///                                  └──another broker is there by now──► lost, for good
///
/// Thread-safety: none; it belongs to the broker's one thread.
#pragma once

#include <sys/stat.h>

#include <chrono>
#include <optional>
#include <string>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::memhandover::detail {

class broker_place {
 public:
  using clock = std::chrono::steady_clock;

  /// Throws `already_exists` if another broker has the folder, `unavailable` with what mends it if the
  /// folder cannot be used.
  explicit broker_place(std::string runtime_dir);

  /// Where visitors arrive; −1 when the place is lost.
  [[nodiscard]] int listener() const noexcept { return listener_.get(); }
  /// Readable when something in the folder has changed; −1 where the system does not tell.
  [[nodiscard]] int watch() const noexcept { return watch_.get(); }
  /// `watch` is readable. The place is looked at a moment later: who removes a folder has to be done first.
  void hear();
  /// When to `look`; nothing while nothing has been heard.
  [[nodiscard]] std::optional<clock::time_point> look_at() const noexcept { return look_at_; }
  /// Whether the folder itself has been removed.
  [[nodiscard]] bool folder_is_gone() const;
  /// Puts right what is missing, the folder included. True if something was; a failure is logged.
  bool look();

 private:
  void take();
  void listen();
  void watch_folder();
  [[nodiscard]] std::string path(char const* name) const { return runtime_dir_ + "/" + name; }

  std::string runtime_dir_;
  unique_fd lock_;
  unique_fd listener_;
  struct stat socket_ {};  ///< the socket's name, as it was made
  unique_fd watch_;
  std::optional<clock::time_point> look_at_;
};

}  // namespace sluice::memhandover::detail
