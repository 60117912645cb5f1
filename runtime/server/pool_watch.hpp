/// What the broker says of a server's pool, for those who cannot wait for it: it is asked on a thread of its own.
///
///   pool_watch pool{[] { return memhandover::query_status(""); }, "127.0.0.1:8000"};
///   if (auto const seen = pool.look(1s)) {
///     // … its "pool", "clients" and "handovers" …
///   }
///
/// Where the broker keeps several pools it is the one that has that server; while its executor is replaced none has, and
/// the one that had it last is meant. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "runtime/server/inference/background_thread.hpp"

namespace sluice::server {

class pool_watch {
 public:
  using query = std::function<nlohmann::json()>;  ///< may throw `error`

  pool_watch(query ask, std::string endpoint)
      : ask_(std::move(ask)), endpoint_(std::move(endpoint)) {}

  /// Nothing if there is no broker or no such pool, or no answer within `patience`.
  [[nodiscard]] std::optional<nlohmann::json> look(std::chrono::milliseconds patience);

 private:
  void ask();
  [[nodiscard]] std::optional<nlohmann::json> own_pool(nlohmann::json answer);

  query const ask_;
  std::string const endpoint_;
  std::string last_id_;  ///< of the thread that asks

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable changed_;
  bool asking_ = false;
  std::uint64_t answers_ = 0;
  std::optional<nlohmann::json> seen_;

  background_thread thread_;  ///< last: it uses what stands above
};

}  // namespace sluice::server
