/// The pools of one broker: at most one for each backend and device, made when somebody first needs
/// it, given back when nobody has needed it for a while.
///
/// Thread-safety: none; it belongs to the broker's one thread. No call waits, but for the
/// constructor.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/broker/detail/kept_pool.hpp"
#include "memhandover/broker/detail/roster.hpp"
#include "memhandover/broker/pool_creation.hpp"
#include "memhandover/device/disk_room.hpp"

namespace sluice::memhandover::detail {

class pool_set {
 public:
  using clock = std::chrono::steady_clock;

  struct options {
    std::string runtime_dir;
    pool_wish wish;  ///< the first pool, and what later ones are where nothing else is said
    std::chrono::milliseconds idle;            ///< for how long a pool is kept that nobody needs
    std::chrono::milliseconds adoption_grace;  ///< how long users of earlier pools are waited for
    std::chrono::milliseconds server_grace;    ///< see kept_pool
    std::uint64_t host_copy_bytes = 0;         ///< see copy_keeper
    disk_wish host_copy_disk{};                ///< likewise
  };

  /// Makes the first pool and waits for it, unless there are pools of an earlier broker to adopt.
  /// Throws why there can be none.
  explicit pool_set(options how);
  pool_set(pool_set const&) = delete;
  pool_set& operator=(pool_set const&) = delete;
  ~pool_set() = default;

  /// It is known which pools of an earlier broker there are.
  [[nodiscard]] bool resolved() const noexcept { return awaited_.empty(); }
  /// Nobody uses any of them.
  [[nodiscard]] bool idle() const;
  /// `pool_id`, `backend` and `device` of each, the first one first.
  [[nodiscard]] nlohmann::json list() const;

  [[nodiscard]] copy_keeper& copies() noexcept { return copies_; }
  /// Bytes of the host's memory that pools and host copies may still come to use.
  [[nodiscard]] std::uint64_t untouched_host_bytes() const;

  [[nodiscard]] kept_pool* find(std::uint64_t pool_id) const;
  /// The pool of a question, named by `pool_id`; the first one if none is named. Throws `not_found`.
  [[nodiscard]] kept_pool& asked_about(nlohmann::json const& body) const;
  /// The pool that a message names by `backend` and `device`, the first one if it names neither. One
  /// that is not there is made, as its `pool_bytes` and `chunk_bytes` say: null meanwhile, ask again
  /// after `serve`. Throws why there can be none.
  [[nodiscard]] kept_pool* find_or_begin(nlohmann::json const& body);
  /// Adds a pool of an earlier broker. Throws `not_found` if there is another one of its device.
  void adopt(pool_files files);

  /// Writes down who uses them, for a successor.
  void write_roster() const;

  void watch(poll_list& polled);
  /// Handles what became ready, and what has come due.
  void serve(poll_list const& polled);
  /// Those that have waited for a pool have been told: failed attempts are forgotten.
  void forget_attempts();
  /// `kept` tells of a pool whether somebody outside of it wants it to stay. The last one stays.
  void give_idle_back(std::function<bool(kept_pool const&)> const& kept);
  [[nodiscard]] std::optional<clock::time_point> wake_at() const;

 private:
  struct member {
    std::unique_ptr<kept_pool> pool;
    clock::time_point needed_at;  ///< when it was last in use
  };
  struct attempt {
    pool_wish wish;
    std::optional<pool_creation> creation;
    std::optional<error> failed;
    std::size_t polled_at = 0;
  };

  [[nodiscard]] kept_pool* find(std::string const& backend, std::optional<int> device) const;
  [[nodiscard]] bool may_live(std::uint64_t pool_id, std::uint32_t slot) const;
  [[nodiscard]] std::uint64_t host_pool_bytes() const;
  [[nodiscard]] pool_wish wish_of(nlohmann::json const& body) const;
  [[nodiscard]] attempt& begin(pool_wish const& wish);
  void advance(attempt& each);

  options options_;
  std::vector<roster_entry> earlier_;   ///< pools of an earlier broker, its first one first
  std::vector<std::uint64_t> order_;    ///< their ids
  std::vector<std::uint64_t> awaited_;  ///< those of them whose users are still to come
  clock::time_point adopt_until_{};
  copy_keeper copies_;
  clock::time_point
      tidy_at_{};  ///< when to look again for users of pools that hold copies and did not come
  std::vector<member> pools_;  ///< the first one is meant where nothing is named
  std::vector<std::unique_ptr<attempt>> attempts_;
};

}  // namespace sluice::memhandover::detail
