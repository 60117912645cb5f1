/// Engines as tenants of the server's pool: what their processes hold there, and the orders that it goes to host copies and
/// comes back.
///
///   engine_tenancy const pool{access};
///   auto const share = pool.look(keeper_pid);  // asks the broker
///   pool.park(share);                          // each of its processes; returns before they go
///   pool.look(keeper_pid).is_away();           // they have gone
///   pool.wake(share);
///
/// The orders are those of `sluice park` and `sluice wake` (memhandover/broker): they stand in the pool's ledger, outlive the server and
/// the broker, and end with the process.
///
/// Thread-safety: any thread. All but `environment_of` wait for the broker, for seconds if it is stopped.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/launcher/launcher.hpp"
#include "runtime/policy/policy.hpp"

namespace sluice::server {

/// A process of an engine that has joined the pool.
struct engine_member {
  std::uint64_t pool_id = 0;
  std::uint32_t slot = 0;
  int pid = 0;
  std::uint64_t resident_bytes = 0, parked_bytes = 0, parks = 0;
  double worked_us = 0;          ///< its device has computed for it
  bool is_held = false;          ///< an order stands
  bool is_gone = false;          ///< all has gone that can, because of it
  bool waits = false;            ///< for memory of the pool
  bool comes = false;            ///< what is away is waited for
  bool in_use = false;           ///< the pool has been told that it answers requests
  bool is_elastic = false;       ///< its memory is a KV cache, which comes and goes by the chunk
  std::uint64_t used_bytes = 0;  ///< of that, by requests
};

/// What all processes of an engine have of the pool.
struct engine_share {
  std::vector<engine_member> members;
  std::string pool_text;  ///< who holds how much of the pool, in words

  [[nodiscard]] std::uint64_t resident_bytes() const noexcept;
  [[nodiscard]] std::uint64_t parked_bytes() const noexcept;
  [[nodiscard]] std::uint64_t parks() const noexcept;
  /// For how long devices have computed for them, since their processes began.
  [[nodiscard]] std::chrono::duration<double, std::micro> worked() const noexcept;
  /// One of them waits for memory that the pool does not have free.
  [[nodiscard]] bool waits() const noexcept;
  /// An order stands for one of them.
  [[nodiscard]] bool is_held() const noexcept;
  /// All have gone as far as they can.
  [[nodiscard]] bool is_away() const noexcept;
  /// The pool has been told of each of them whether it answers requests.
  [[nodiscard]] bool is_noted(bool in_use) const noexcept;
  /// Those that go first have gone, and the others have not been ordered to.
  [[nodiscard]] bool awaits_order() const noexcept;
  /// What KV caches hold, and what requests use of that; nothing where there is none.
  struct cache {
    std::uint64_t bytes = 0, used_bytes = 0;
  };
  [[nodiscard]] std::optional<cache> kv() const noexcept;
  /// Nothing of any is away, and no order stands.
  [[nodiscard]] bool is_back() const noexcept;
};

/// Of what the broker says of its pools, what concerns the processes that descend from `root`, itself included.
[[nodiscard]] engine_share share_of(nlohmann::json const& status, pid_t root);

class engine_tenancy {
 public:
  struct access {
    std::function<nlohmann::json()> look;  ///< the broker's status; throws `error`
    std::function<void(nlohmann::json const& order)> order;  ///< likewise
    launcher::install_layout installed;
    launcher::job_pool pool;
    int device = 0;
  };

  explicit engine_tenancy(access how);

  /// What an engine is started with so that its memory, its KV cache, or both are the pool's; one that is always warm is never parked. Throws `unsupported`
  /// and `invalid_argument` with what would be right.
  [[nodiscard]] launcher::environment environment_of(policy::model_policy const& engine,
                                                     launcher::environment own) const;

  [[nodiscard]] engine_share look(pid_t root) const;
  /// The same of several, for which the broker is asked once.
  [[nodiscard]] std::vector<engine_share> look(std::vector<pid_t> const& roots) const;
  /// Orders it of each that is not held: first of KV caches, which go when the step in flight has ended, and only when they have
  /// gone of what that step computes with. Throws why one cannot be parked; then those before it have been ordered.
  void park(engine_share const& who) const;
  /// Takes back what stands, and has come back what is away for whatever reason.
  void wake(engine_share const& who) const;
  /// Tells the pool of each whether it answers requests, so that a demand parks others first.
  void note(engine_share const& who, bool in_use) const;

 private:
  void give(nlohmann::json const& order) const;

  access how_;
};

}  // namespace sluice::server
