/// One run of an engine: its keeper, the way to it, and where its log begins.
///
///   engine_process run{order};
///   auto const said = run.hear();   // {"type": "started", …}, once run.socket() is readable
///   run.stop();                     // in order; the destructor ends what is left at once
///
/// One server may leave it to the next, whom the keeper gives it when the first has said so:
///
///   run.leave({{"ready", true}});   // used still, until the destructor, which ends nothing now
///   for (auto const& place : meeting_places(folder, 0)) {
///     if (auto const left = engine_process::meet(place)) left->adopt();  // "yours"
///   }
///
/// Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
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
  std::filesystem::path meeting{};  ///< where a successor finds its keeper; empty: there is none
  nlohmann::json identity{};        ///< by which that one knows whether it would start the same
  engine_address address{};
  std::chrono::milliseconds patience{};  ///< after which one that nobody has is ended
};

/// A place that nobody has, for the keeper of an engine of that device's server. Its name is short, as those of sockets are.
[[nodiscard]] std::filesystem::path new_meeting_place(std::filesystem::path const& runtime_folder,
                                                      int device);
/// All that are there, also those that keepers which were killed have left.
[[nodiscard]] std::vector<std::filesystem::path> meeting_places(
    std::filesystem::path const& runtime_folder, int device);

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
  /// Returns when all of it has ended, if it is this server's.
  ~engine_process();

  /// One that another server has started. Nothing: nobody is there any more, which is cleared away, or he does not answer.
  [[nodiscard]] static std::unique_ptr<engine_process> meet(std::filesystem::path const& place);
  /// Asks for it; it is this server's when `hear` says so.
  void adopt();
  /// It may be the next server's from now on, which hears these notes.
  void leave(nlohmann::json const& notes);
  [[nodiscard]] bool is_own() const noexcept { return is_own_; }
  [[nodiscard]] nlohmann::json const& identity() const noexcept { return identity_; }
  [[nodiscard]] engine_address const& address() const noexcept { return address_; }
  /// Of the engine's first process, once it has started.
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }

  /// Readable when there is something to hear.
  [[nodiscard]] int socket() const noexcept { return server_end_.get(); }
  /// Of its keeper, from which all that it starts descends.
  [[nodiscard]] pid_t keeper_pid() const noexcept { return keeper_pid_; }
  /// What the keeper says next (engine_keeper.hpp), or that it has ended, too; nothing: not yet.
  [[nodiscard]] std::optional<nlohmann::json> hear();
  /// Asks the engine to end, if it is this server's.
  void stop();
  /// The last lines of its log, of this run; empty if it has said nothing.
  [[nodiscard]] std::string last_lines() const;

 private:
  engine_process() = default;
  void say(nlohmann::json const& what) const noexcept;

  std::filesystem::path log_;
  std::uintmax_t log_begin_ = 0;
  memhandover::unique_fd server_end_;
  child_process keeper_;  ///< none of one that another server has started
  pid_t keeper_pid_ = 0;
  bool is_own_ = true;
  nlohmann::json identity_;
  engine_address address_;
  pid_t pid_ = 0;
};

}  // namespace sluice::server
