/// The processes of the tests: each is this program again, with its role as first argument.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::test {

/// Runs the role that the arguments name; −1 if they name none and the tests are to run.
int run_role(int argc, char** argv);

/// A child process in a role. It says lines on its standard output; it is killed when this object
/// dies.
class child {
 public:
  child() = default;
  child(std::string const& role, std::vector<std::string> arguments);
  child(child&&) noexcept = default;
  child& operator=(child&& other) noexcept;
  ~child();

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  /// Its next line, without the newline; empty when it has ended. Fails the test after half a
  /// minute of silence.
  [[nodiscard]] std::string line();
  /// Kills it and waits for its end.
  void kill();
  /// Stops it (SIGSTOP) and waits until all its threads stand still; SIGCONT lets it go on.
  void hold() const;
  /// Asks it to end (SIGTERM) and returns its exit code.
  int stop();

 private:
  pid_t pid_ = 0;
  memhandover::unique_fd output_;
  std::string pending_;
};

}  // namespace sluice::test
