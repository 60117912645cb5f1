/// Contents of a tenant's chunks in host memory: out, so that the chunks can be another's, and back under the same
/// addresses.
///
///   resident ──hashed──┬─ zero ──────────────────────────┐
///                      ├─ as the copy that was kept ─────┤
///                      └─ else copied to a slot ─────────┴─► parked ──chunk, copied or zeroed──► resident, copy kept
///
/// At each instant one place has the contents: the device until a position has been unmapped, from then on the slot, and
/// the device again once the copy back has ended. A chunk is given away after it has been unmapped, never before, and a
/// slot after that last copy. Positions in which nothing lives go first, without a look, and come back zeroed.
///
/// A copy that was brought back is kept as long as nobody needs its slot: contents with the same hash (content_hash.hpp) need
/// not be copied again. Where the device cannot hash, all are copied.
///
/// Slots in memory are used first. What gets one on the disk is copied to memory that is staged for it, written from there, and given
/// away when it is on the disk. If that fails it stays, and this tenant uses the disk no more; if it cannot be read, it is lost.
///
///   tenant_parking parking{mutex, memory, copies, driver};
///   // nothing runs on the device, and until `parked().all()` is 0 again nothing may
///   parking.take(spaces, 12, wanted.give, wanted.stands);
///   parking.bring_back(stock.take(parking.parked().all()));
///
/// On the host what lasts lies in private pages of the process, which its threads use whenever they like. They are taken away
/// (held_pages.hpp) before anybody looks at them: whoever touches one waits until it is back.
///
/// Thread-safety: one thread, in which the device's context is current. The mutex is locked for moments, as often as a
/// space changes; spaces from which something is parked must not lose chunks otherwise, nor end.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memhandover/allocation/chunk_space.hpp"
#include "memhandover/client/host_copy_share.hpp"
#include "memhandover/device/chunk_transfer.hpp"
#include "memhandover/device/content_hash.hpp"
#include "memhandover/device/device_memory.hpp"
#include "memhandover/device/held_pages.hpp"
#include "memhandover/parking/return_estimate.hpp"

namespace sluice::memhandover {

/// What was parked cannot be had any more.
class contents_lost : public error {
 public:
  explicit contents_lost(std::string const& why) : error(error_kind::unavailable, why) {}
};

class tenant_parking {
 public:
  /// What has been parked, in chunks.
  struct counts {
    std::uint32_t dirty = 0;  ///< copied to a slot
    std::uint32_t clean = 0;  ///< as the copy that a slot had
    std::uint32_t zero = 0;   ///< without a copy: all of it was, or nothing lived there
    std::uint32_t disk = 0;   ///< of the dirty and clean ones, those whose slot is on the disk
    [[nodiscard]] std::uint32_t all() const noexcept { return dirty + clean + zero; }
  };

  /// `mutex` guards the spaces. All must outlive this object. `own_pages`: the spaces hold private pages, all of them.
  /// Throws what the driver says.
  tenant_parking(std::mutex& mutex, device_memory& memory, host_copy_share& copies,
                 std::shared_ptr<cuda_driver const> driver,
                 std::unique_ptr<held_pages> own_pages = nullptr);
  tenant_parking(tenant_parking const&) = delete;
  tenant_parking& operator=(tenant_parking const&) = delete;
  /// Gives the slots back, kept ones as well: what is still parked is lost, and private pages of it are zero.
  ~tenant_parking();

  /// Hears of chunks, of each once.
  using taker = std::function<void(std::span<std::uint32_t const> chunks)>;

  /// Parks up to `count` chunks of `spaces`, in their order, and calls `give` with them as soon as nothing maps them here.
  /// Fewer if there are too few, or too few free slots, or once `goes_on` says false: then what is being
  /// copied still ends, and nothing is begun that would go to the disk. If it throws, which `give` may not, what has been given away is parked, and the rest is as it was.
  /// `chosen` is called before, once, with those that will go if there is room for all their contents.
  void take(std::span<chunk_space* const> spaces, std::uint32_t count, taker const& give,
            std::function<bool()> const& goes_on, taker const& chosen = {});

  /// Maps `chunks`, one for each that is parked, and brings the contents back. If it throws, everything is parked as it
  /// was and the chunks are mapped nowhere. Throws `contents_lost` for what the disk does not give back.
  void bring_back(std::span<std::uint32_t const> chunks);

  [[nodiscard]] counts parked() const noexcept;
  /// Whether a thread has begun to wait for a private page since this was asked last.
  [[nodiscard]] bool touched() noexcept { return own_pages_ != nullptr && own_pages_->touched(); }
  /// A slot that was held for contents and is not any more: they are gone for good. Throws as `host_copies::at`.
  [[nodiscard]] std::optional<std::uint32_t> lost() const;
  /// The errno of the write to the disk that has failed; 0: none has.
  [[nodiscard]] int disk_fault() const noexcept { return disk_fault_; }
  /// What the disk took for all that has been parked since the last return, and for that return.
  [[nodiscard]] disk_time written() const noexcept { return written_; }
  [[nodiscard]] disk_time read() const noexcept { return read_; }

 private:
  struct place {
    chunk_space* of = nullptr;
    std::uint32_t position = 0;
    std::optional<held_copy> copy{};     ///< none: zero
    std::optional<content_hash> hash{};  ///< of the contents, where it is known
    bool is_clean = false;
    bool is_held = false;        ///< who touches it waits
    std::byte* aside = nullptr;  ///< where its private pages lie, until there is a copy
    std::byte* stage = nullptr;  ///< on its way to the disk
  };
  struct kept_copy {
    held_copy slot;
    content_hash hash;
  };
  class departure;

  [[nodiscard]] std::vector<std::uint32_t> take_unused(std::span<chunk_space* const> spaces,
                                                       std::uint32_t count);
  [[nodiscard]] std::vector<place> choose(std::span<chunk_space* const> spaces,
                                          std::uint32_t count);
  [[nodiscard]] std::byte* take_aside(place& at);
  void restore(place& at) noexcept;
  void unmap(std::span<place> run, taker const& give);
  [[nodiscard]] bool follows(place const& one, place const& other) const noexcept;
  [[nodiscard]] bool find_slot(place& at);
  [[nodiscard]] std::optional<held_copy> any_slot();
  [[nodiscard]] std::optional<held_copy> slot_in(copy_place where);
  [[nodiscard]] bool is_on_disk(held_copy const& slot) const noexcept;
  [[nodiscard]] bool disk_is_usable() const noexcept;
  [[nodiscard]] std::byte* take_stage() noexcept;
  [[nodiscard]] bool save(place& at);
  [[nodiscard]] std::byte* load(place const& at);
  void note_ended(std::size_t copies);
  void await_copies_below(std::size_t count);
  [[nodiscard]] std::optional<kept_copy> take_kept(place const& at);
  void refill(place const& at, std::uint32_t chunk, bool in_use);
  void keep_or_drop(place const& at) noexcept;
  [[nodiscard]] std::size_t run_from(std::size_t first) const noexcept;

  std::mutex& mutex_;
  device_memory& memory_;
  host_copy_share& share_;
  std::unique_ptr<chunk_transfer> transfer_;
  std::unique_ptr<content_hasher> hasher_;
  std::unique_ptr<held_pages> own_pages_;  ///< none: the spaces hold chunks of the pool
  std::vector<place> parked_;
  std::vector<std::uint32_t> going_chunks_;  ///< that are being given
  /// By the address that they were brought back to. Others may have taken their slots.
  std::map<std::byte const*, kept_copy> kept_;
  std::vector<std::byte*> stages_;  ///< that nothing is in
  std::deque<std::byte*>
      coming_;  ///< of each copy back that is on its way, the stage that it is from, or null
  int disk_fault_ = 0;
  disk_time written_;
  disk_time read_;
};

}  // namespace sluice::memhandover
