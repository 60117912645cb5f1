/// A program that this process starts and ends, with one descriptor.
///
///   auto child = child_process::start({"/opt/worker", "--socket", "3"}, std::move(socket));
///   child.kill();
///   auto const end = child.wait();                 // end.text: "was ended by signal 9"
///
/// What it holds alone, its end of a socket, is hung up when it ends.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::server {

/// How a process has ended.
struct process_end {
  std::string text;           ///< in words that go on after "the process"
  bool well = false;          ///< with exit code 0
  bool from_outside = false;  ///< somebody has killed it, and not the kernel for want of memory
};

class child_process {
 public:
  /// The program's own descriptor of `passed`.
  static constexpr int passed_descriptor = 3;

  /// Its signals are as at the start of a process, and beside `passed` it has this process's standard streams alone. Throws `unsupported` if the
  /// program cannot be started.
  [[nodiscard]] static child_process start(std::vector<std::string> command,
                                           memhandover::unique_fd passed);

  child_process() = default;
  child_process(child_process&& other) noexcept;
  child_process& operator=(child_process&& other) noexcept;
  child_process(child_process const&) = delete;
  child_process& operator=(child_process const&) = delete;
  /// Kills it if it has not been waited for.
  ~child_process();

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  void kill() const noexcept;
  /// It goes on without this process, which no longer waits for it.
  void leave() noexcept { pid_ = 0; }
  /// Until it has ended, without taking note of it: another thread may still kill it.
  void await_end() const noexcept;
  /// Until it has ended.
  process_end wait();
  /// What has happened until now has nothing to do with how it ends.
  void watch_from_now();

 private:
  pid_t pid_ = 0;                       ///< 0: none, or it has been waited for
  std::uint64_t kills_for_memory_ = 0;  ///< by the kernel, of anybody, before it began
};

}  // namespace sluice::server
