/// The inference server's side of the pool: it asks for bytes, and gets memory that training, or an engine, gave
/// up if need be.
///
/// The server is the ledger's writer from the end of `join` until it dies. One thread of this object
/// answers training's mailboxes; the public functions may be called from any thread.
///
///   joined ──opens the device, maps the pool──► ready ──broker names it──► writer
///      the broker writes the ledger meanwhile, so that nobody waits for a server that starts
///
///   auto pool = serving_pool::join({.name = "server", .endpoint = "127.0.0.1:8000"});
///   auto weights = pool->acquire(90_MiB, deadline);   // may take chunks from training
///   auto claim = pool->claim_compute();               // training's gate holds its launches
///   // … run the model out of weights.data() …
///
/// Source of the protocol: docs/architecture.md, "Handover".
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include "memhandover/client/chunk_pool.hpp"
#include "memhandover/client/warm_memory.hpp"
#include "memhandover/device/device_memory.hpp"
#include "memhandover/device/disk_room.hpp"

namespace sluice::memhandover {

/// How one acquisition went. Times are from the start of `acquire`; a phase that did not happen is
/// zero.
struct handover_report {
  std::uint64_t bytes = 0;  ///< acquired in all
  /// Of these, taken from training and engines (0: the pool had enough free).
  std::uint64_t bytes_reclaimed = 0;
  std::uint64_t bytes_live = 0;       ///< of these, from a micro-batch that was running
  std::chrono::nanoseconds notify{};  ///< demand written → first acted on by a thread of training
  std::chrono::nanoseconds gate{};    ///< → gate closed, nobody inside
  /// → device idle (zero on the host, which revokes under running kernels).
  std::chrono::nanoseconds drain{};
  std::chrono::nanoseconds revoke{};  ///< → chunks no longer training's, released posted
  std::chrono::nanoseconds ledger{};  ///< → owners flipped
  std::chrono::nanoseconds map{};     ///< → mapped contiguously for the server
  /// Of `bytes_reclaimed`: parked; and until the gate was closed to all, the device was proven idle, enough chunks had
  /// gone. With an answer these are parts of `revoke`, and without one, since enough had come before it, of the others.
  std::uint64_t bytes_parked = 0;
  std::chrono::nanoseconds park_closing{}, park_idle{}, park_out{};
  /// Demand → what the device was executing as the gate closed had ended, as far as that is known:
  /// the part of `total` that no software can shorten.
  std::chrono::nanoseconds unit{};
  std::chrono::nanoseconds total{};  ///< demand → memory usable
};

struct pool_usage {
  std::uint64_t total_bytes = 0;
  /// Free, dirty, or left by a dead server, and not owed to a job that is parked.
  std::uint64_t free_bytes = 0;
  std::uint64_t training_bytes = 0;
  std::uint64_t serving_bytes = 0;
  std::uint64_t engine_bytes = 0;
  /// Of training's and engines': what no acquisition gets. All of an engine that is not demanded from.
  std::uint64_t kept_bytes = 0;

  [[nodiscard]] std::uint64_t tenant_bytes() const noexcept {
    return training_bytes + engine_bytes;
  }
};

/// Memory that a job which is parked has to have back, so that it has its share of time.
struct owed_memory {
  std::chrono::steady_clock::time_point at;  ///< from then on; may be past
  std::uint64_t missing_bytes = 0;           ///< that are not free for it now
  /// For so long the job keeps it at least, by what it took to be parked so far.
  std::chrono::milliseconds stay{};
};

class serving_pool;

/// Contiguous pool memory, the server's until this object dies. Movable. Empty after a default
/// construction or a move.
class placement {
 public:
  placement() noexcept = default;
  /// Memory that `hold` keeps; what `hold` does when it goes gives the memory back.
  placement(std::shared_ptr<void> hold, std::byte* data, std::uint64_t bytes) noexcept
      : hold_(std::move(hold)), data_(data), bytes_(bytes) {}
  placement(placement const&) = delete;
  placement& operator=(placement const&) = delete;
  placement(placement&& other) noexcept;
  placement& operator=(placement&& other) noexcept;
  ~placement();
  /// Start of the memory: a host address, or a device address of the pool's GPU.
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  std::shared_ptr<void> hold_;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// While it lives, training's gates hold their launches (a lease in shared memory that expires by
/// itself if the server dies or hangs). Claims nest and may overlap.
class compute_claim {
 public:
  compute_claim() noexcept = default;
  explicit compute_claim(std::shared_ptr<void> hold) noexcept : hold_(std::move(hold)) {}

 private:
  std::shared_ptr<void> hold_;
};

/// As a `chunk_pool` it lends chunks one by one; `acquire` is for those who want contiguous memory.
class serving_pool : public chunk_pool {
 public:
  struct options {
    std::string name = "server";  ///< shown in `sluice status`
    std::string endpoint{};     ///< host:port where `sluice status` can ask for more; may be empty
    std::string runtime_dir{};  ///< folder of the broker's socket; empty: the default
    std::uint64_t pool_bytes = 0;   ///< size of the pool if this call has to make it; 0: default
    std::uint64_t chunk_bytes = 0;  ///< likewise; 0: default of the backend
    std::string backend{};          ///< "host", "cuda" or empty (cuda where there is a GPU)
    std::optional<int> device{};    ///< CUDA ordinal, or number of a pool on the host; without
                                    ///< one the broker's first pool
    std::string sluice_binary{};    ///< program that is the broker; empty: $SLUICE_BROKER, else
                                    ///< `sluice` on PATH
    std::uint64_t host_copy_bytes =
        0;                       ///< host memory for what tenants park, if this starts the broker
    disk_wish host_copy_disk{};  ///< beyond that, likewise
    /// How long a compute pause outlives a dead server.
    std::chrono::milliseconds pause_lease{100};
    /// How long `join`, once ready, waits for what an earlier server held.
    std::chrono::milliseconds patience{60'000};
    /// Tenants may be parked for this server, and stay then for so many times as long as going and coming takes; 0:
    /// they may not.
    std::uint32_t park_stay = 0;
    /// Who is parked is to be resident for that share of every window of that length; 0: there is no such share.
    double resident_share = 0.0;
    std::chrono::nanoseconds resident_window{std::chrono::minutes{1}};
    /// Whether an acquisition for which training has too little demands from engines as well.
    bool demands_from_engines = false;
  };

  /// Finds the broker or starts it, and becomes the pool's server: opens the memory, then waits
  /// until the broker makes it the ledger's writer, which it does once what an earlier server held
  /// has been taken back. A broker that dies meanwhile is replaced.
  /// Throws `already_exists` if the pool has a live server, `unavailable` if no broker can be
  /// reached or started, or if the pool has not become this server's within `patience`.
  [[nodiscard]] static std::shared_ptr<serving_pool> join(options const& how);

  [[nodiscard]] virtual pool_shape shape() const = 0;
  [[nodiscard]] virtual pool_usage usage() const = 0;

  /// Memory of at least `bytes`: free chunks first, then training's, then engines' if the options say so.
  /// Throws `out_of_memory` if even all that these can give is too little (whoever holds the
  /// rest is named), or is a matter of time, which `retry_after` then says: jobs stay that have been parked, or what is free is
  /// owed to one; `deadline_exceeded` if who was asked did not answer by `deadline`. After a failure
  /// the claim has been given back. Chunks that are `spare` (chunk_pool.hpp) are refused with `out_of_memory` before anybody is asked
  /// where they are not to be had, and with `cancelled` when they are called off, or somebody else wants memory.
  /// `what` it will hold, such as a model's name, is shown by `sluice pool show`.
  [[nodiscard]] virtual placement acquire(std::uint64_t bytes,
                                          std::chrono::steady_clock::time_point deadline,
                                          handover_report* report = nullptr,
                                          std::string_view what = {}) = 0;

  /// What jobs that are parked are owed next and is not free: whoever has pool memory that nobody needs now is to give it back
  /// by then. What is free and owed is kept: `acquire` does not get it.
  [[nodiscard]] virtual std::optional<owed_memory> owed() const = 0;

  /// Demands what is owed now from tenants, by `deadline`: for an engine from jobs, and from other engines where the options say
  /// so; for a job from engines. What comes free is kept for them. Too little is no error.
  virtual void gather_owed(std::chrono::steady_clock::time_point deadline) = 0;

  /// Whether a job that cannot go on needs memory which jobs of lower priority could give.
  [[nodiscard]] virtual bool is_needed() const = 0;
  /// Demands that from them, by `deadline`, without parking anybody. What comes free is kept for who needs it. Too little is no
  /// error. Returns whether it has come. Throws `cancelled` when it is called off, or somebody else wants memory meanwhile, and
  /// `deadline_exceeded` as `acquire`.
  virtual bool gather_needed(std::chrono::steady_clock::time_point deadline,
                             std::stop_token called_off = {}) = 0;

  /// Free bytes that are kept from tenants, so that cold starts find memory at once (the reserve
  /// W).
  virtual void set_reserve(std::uint64_t bytes) = 0;

  /// How much predicted work training may give a stream at a time, so that the device is soon its
  /// own again; not longer than `longest_run_ahead`. Jobs follow it from their next micro-batch on,
  /// until this server is gone.
  virtual void set_run_ahead(std::chrono::nanoseconds bound) = 0;

  /// A claim is expected within that time, at most `longest_announcement`: on a GPU training puts less on the device until
  /// then, and begins nothing long. Waits for nobody. The latest counts.
  static constexpr std::chrono::milliseconds longest_announcement{100};
  virtual void announce_compute(std::chrono::nanoseconds within) = 0;

  /// A claim that holds launches until `until` at most, whenever it is dropped: the end stands in
  /// shared memory from the beginning.
  [[nodiscard]] virtual compute_claim claim_compute(
      std::chrono::steady_clock::time_point until) = 0;
  [[nodiscard]] compute_claim claim_compute() {
    return claim_compute(std::chrono::steady_clock::time_point::max());
  }

  /// From now on `hears` is told when the device begins to work for engines of the pool, and when it has done all for all of them,
  /// one at a time, by a thread that it may not keep. `waited` as `work_report::drained` says. With an empty one nobody is told any
  /// more, from when this returns.
  virtual void watch_engines(std::function<void(bool works, bool waited)> hears) {
    (void)hears;  // where there are none
  }

  /// What outlives this server, and what it inherits; lives as long as the pool. Null for a pool
  /// whose memory ends with the process.
  [[nodiscard]] virtual warm_memory* warm() noexcept { return nullptr; }
};

}  // namespace sluice::memhandover
