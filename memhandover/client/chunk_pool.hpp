/// A pool chunk by chunk, for an allocator that places several things in one chunk.
///
/// The holder maps the whole pool once, chunk i at offset i × chunk_bytes of the *whole view*, so that
/// neighbours are contiguous. Other chunks can be *stitched*: mapped whole, a second time, one after
/// the other. What is stitched stays mapped until `unstitch`, whoever gets the chunks meanwhile.
///
/// All functions may be called from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stop_token>
#include <string_view>
#include <utility>
#include <vector>

namespace sluice::memhandover {

struct handover_report;

/// Until when memory is waited for, and what it may cost others. A deadline alone stands for a request's.
///
/// What is *spare* nobody waits for: it is what is free, and what jobs can give at once. No job is parked for it, engines are not asked,
/// nothing is taken while something is owed to anybody, and it gives way to whoever else wants memory.
struct urgency {
  // NOLINTNEXTLINE(google-explicit-constructor,hicpp-explicit-conversions)
  urgency(std::chrono::steady_clock::time_point until) noexcept : deadline(until) {}
  [[nodiscard]] static urgency spare(std::chrono::steady_clock::time_point until,
                                     std::stop_token called_off = {}) noexcept {
    urgency made{until};
    made.is_spare = true;
    made.called_off = std::move(called_off);
    return made;
  }

  std::chrono::steady_clock::time_point deadline;
  bool is_spare = false;
  std::stop_token called_off{};  ///< of what is spare: it ends with `cancelled` then
};

class chunk_pool {
 public:
  using foresight = std::function<void(std::span<std::uint32_t const> foreseen)>;

  chunk_pool() = default;
  chunk_pool(chunk_pool const&) = delete;
  chunk_pool& operator=(chunk_pool const&) = delete;
  virtual ~chunk_pool() = default;

  /// Chunks that are nobody's now, ascending. Others may get them at any time.
  [[nodiscard]] virtual std::vector<std::uint32_t> free_chunks() const = 0;
  /// Takes exactly these if all of them are nobody's; else none, and returns false.
  [[nodiscard]] virtual bool take_chunks(std::span<std::uint32_t const> chunks) = 0;
  /// `count` chunks, ascending: free ones first, then tenants'; neighbours if possible. Throws as
  /// `serving_pool::acquire` does; after a failure nothing has been taken.
  /// Where a tenant is asked, `meanwhile` is called before its answer is waited for, with the chunks
  /// that will probably be had; it must not throw.
  [[nodiscard]] virtual std::vector<std::uint32_t> acquire_chunks(
      std::uint32_t count, urgency const& how, handover_report* report,
      foresight const& meanwhile = {}) = 0;
  virtual void give_back_chunks(std::span<std::uint32_t const> chunks) = 0;

  [[nodiscard]] virtual std::byte* whole_view() const noexcept = 0;
  /// Throws `out_of_memory` if there are no addresses left.
  [[nodiscard]] virtual std::byte* stitch(std::span<std::uint32_t const> chunks) = 0;
  virtual void unstitch(std::byte* where, std::uint32_t count) noexcept = 0;

  /// What chunks of the server hold, as `sluice pool show` tells it.
  virtual void note_chunks(std::span<std::uint32_t const> chunks, std::string_view what) = 0;
  /// `what` has begun to use chunks of the server, which lie one after the other at `where`, or for
  /// null in the whole view: for `sluice pool show --address`.
  virtual void record_use(std::span<std::uint32_t const> chunks, std::byte const* where,
                          std::string_view what) = 0;
};

}  // namespace sluice::memhandover
