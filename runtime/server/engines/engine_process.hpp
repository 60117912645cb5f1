/// One run of an engine: its keeper, the way to it, and where its log begins.
///
///   engine_process run{order};
///   auto const said = run.hear();   // {"type": "started", …}, once run.socket() is readable
///   run.stop();                     // in order; the destructor ends what is left at once
///
/// Not thread-safe.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/executor/child_process.hpp"
#include "runtime/server/inference/engine_gateway.hpp"

namespace sluice::server {

struct engine_order {
  std::filesystem::path keeper;  ///< the program that is one, as `PROGRAM --keep-engine NAME`
  std::string name;
  std::vector<std::string> command, environment;  ///< the latter as NAME=value
  std::filesystem::path folder;                   ///< in which it runs
  std::filesystem::path log;                      ///< to which it is appended
};

/// `text` with the address in the places of "{port}" and "{socket}".
[[nodiscard]] std::string with_address(std::string text, engine_address const& address);

/// A port of 127.0.0.1 that nobody has at the moment. Throws `unavailable` where there is none.
[[nodiscard]] std::uint16_t free_port();

class engine_process {
 public:
  /// Throws `unsupported` if no keeper can be started, `unavailable` if the log cannot be written.
  explicit engine_process(engine_order const& order);
  engine_process(engine_process const&) = delete;
  engine_process& operator=(engine_process const&) = delete;
  engine_process(engine_process&&) = delete;
  engine_process& operator=(engine_process&&) = delete;
  ~engine_process();

  /// Readable when there is something to hear.
  [[nodiscard]] int socket() const noexcept { return server_end_.get(); }
  /// Of its keeper, from which all that it starts descends.
  [[nodiscard]] pid_t keeper_pid() const noexcept { return keeper_.pid(); }
  /// What the keeper says next (engine_keeper.hpp), or that it has ended, too; nothing: not yet.
  [[nodiscard]] std::optional<nlohmann::json> hear();
  /// Asks the engine to end.
  void stop();
  /// The last lines of its log, of this run; empty if it has said nothing.
  [[nodiscard]] std::string last_lines() const;

 private:
  std::filesystem::path log_;
  std::uintmax_t log_begin_ = 0;
  memhandover::unique_fd server_end_;
  child_process keeper_;
};

}  // namespace sluice::server
