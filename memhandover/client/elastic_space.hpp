/// An engine's range of addresses, behind whose *places* chunks of the pool come and go, one by one, as the engine asks for them,
/// gives them back, and gives them up when they are demanded.
///
///     empty ──back──► backed ──give_back──► empty       an access to an empty place faults
///
///   elastic_space space{broker, "vllm"};
///   space.reserve(64);
///   std::array const first{0U, 1U};
///   if (space.back(first, steady_clock::now() + 1s)) {
///     space.base()[0] = std::byte{1};  // it was zero
///   }
///   space.answer(1);
///   if (space.demanded() > 1) {
///     space.give_back(std::array{1U});
///   }
///   space.refuse_rest();
///   if (space.is_ordered_away()) {
///     space.give_back(first);
///     space.rest(1);
///   }
///
/// A demand waits until the engine has given what it asks for, has said that no more comes, or the demand is withdrawn because its
/// own time is over. Before `answer` it is given nothing.
///
/// An order that it is parked (`sluice park`, and what parks engines that rest) takes all of it; nothing is copied. When nothing
/// is backed any more the engine says so, and is parked until it has what it needs to go on: the pool owes it that once the order has ended.
///
///   resident ──rest──► parked ──back──► resident
///
/// Thread-safety: all functions from any thread, but `reserve` before all others, and a place is one thread's at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memhandover/client/tenant_client.hpp"
#include "memhandover/device/cuda_driver.hpp"
#include "memhandover/device/device_memory.hpp"
#include "memhandover/ledger/chunk_notes.hpp"

namespace sluice::memhandover {

class elastic_space {
 public:
  /// Joins the pool as an engine of that name. `driver`: of the pool's GPU; null on the host. Throws as `tenant_client::join` and
  /// `open_device_memory` do.
  elastic_space(broker_options const& broker, std::string const& name,
                std::shared_ptr<cuda_driver const> driver = nullptr);
  elastic_space(elastic_space const&) = delete;
  elastic_space& operator=(elastic_space const&) = delete;
  /// All places are empty then.
  ~elastic_space();

  [[nodiscard]] pool_shape const& shape() const noexcept;
  /// So many addresses, once. Throws `invalid_argument` for none, and for more than the pool has chunks; `out_of_memory`
  /// if there are no addresses left.
  void reserve(std::uint32_t places);
  [[nodiscard]] std::byte* base() const noexcept { return base_; }
  [[nodiscard]] std::uint32_t places() const noexcept {
    return static_cast<std::uint32_t>(chunks_.size());
  }

  /// Puts memory behind all of these, zeroed; false if the pool does not grant so much by the deadline: then nothing has changed,
  /// as after an error. One that has passed asks once. Throws `invalid_argument` for places that do not exist or are not empty.
  [[nodiscard]] bool back(std::span<std::uint32_t const> places,
                          std::chrono::steady_clock::time_point deadline);
  /// Nothing reaches these any more: their chunks are the pool's. Throws `invalid_argument` for places that are not backed.
  void give_back(std::span<std::uint32_t const> places);

  /// From now on demands are waited for. So many places stay backed whatever is demanded, as others can see.
  /// Nor is it parked then, by anybody, unless it `may_be_parked`.
  void answer(std::uint32_t kept, bool may_be_parked = true);
  /// How many chunks are demanded and have not been given. A load of one word.
  [[nodiscard]] std::uint32_t demanded() const noexcept {
    return demanded_.load(std::memory_order_acquire);
  }
  /// Waits until chunks are demanded, or somebody rouses it, at most until then; how many.
  [[nodiscard]] std::uint32_t await_demand(std::chrono::steady_clock::time_point deadline);
  /// Whoever awaits a demand, or is the next to do so, does not wait any longer.
  void rouse();
  /// No more comes for what is demanded now.
  void refuse_rest();
  /// Of what is backed, what requests use now: for those who look.
  void show_used(std::uint64_t bytes) noexcept;

  /// Whether it is to go as a whole, and has not said that it has.
  [[nodiscard]] bool is_ordered_away() const noexcept;
  /// Whether all of it has gone.
  [[nodiscard]] bool is_parked() const noexcept { return parked_.load(std::memory_order_acquire); }
  /// It is parked from now on, until the next `back` that succeeds, which fails as long as an order stands; of so many places, to
  /// be shown. Throws `invalid_argument` for none, and where something is backed.
  void rest(std::uint32_t needed);

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  [[nodiscard]] demand_answer answer_demand(demand const& wanted);
  [[nodiscard]] std::byte* at(std::uint32_t place) const noexcept;
  [[nodiscard]] bool obtain(std::vector<std::uint32_t>& chunks, std::vector<std::uint32_t>& dirty,
                            std::uint32_t count, std::chrono::steady_clock::time_point deadline);
  void fill(std::span<std::uint32_t const> places, std::span<std::uint32_t const> chunks,
            std::span<std::uint32_t const> dirty);
  void release(std::span<std::uint32_t const> places);
  void check(std::span<std::uint32_t const> places, bool backed) const;
  void show_kept();
  [[nodiscard]] bool is_held() const noexcept;
  [[nodiscard]] bool obtain_to_come_back(std::vector<std::uint32_t>& chunks,
                                         std::vector<std::uint32_t>& dirty, std::uint32_t count,
                                         std::chrono::steady_clock::time_point deadline);
  void note_back(std::int64_t since_ns);

  std::unique_ptr<device_memory> memory_;
  std::byte* base_ = nullptr;
  std::mutex growing_;        ///< one `back` at a time: what is granted cannot be told apart
  mutable std::mutex mutex_;  ///< guards what follows
  std::condition_variable changed_;
  std::vector<std::uint32_t> chunks_;  ///< by place; `none`: it is empty
  std::vector<bool> used_;             ///< by chunk: this has written into it
  std::uint32_t backed_ = 0;
  std::uint32_t kept_ = 0;
  bool answers_ = false;
  bool roused_ = false;
  std::optional<chunk_notes> notes_;
  std::atomic<std::uint32_t> demanded_{0};  ///< changed under `mutex_`
  std::atomic<bool> parked_{false};         ///< changed under `growing_`
  std::unique_ptr<tenant_client> client_;
};

}  // namespace sluice::memhandover
