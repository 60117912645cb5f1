/// The inside of a tensor heap: tensor_heap.cpp loads and unloads, tensor_heap_succession.cpp publishes and adopts.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memhandover/allocation/detail/stitched_ranges.hpp"
#include "memhandover/allocation/tensor_heap.hpp"

namespace sluice::memhandover {

class tensor_heap::impl : public std::enable_shared_from_this<impl> {
 public:
  impl(std::shared_ptr<serving_pool> pool, std::uint64_t alignment)
      : pool_(std::move(pool)),
        alignment_(alignment),
        places_(pool_->shape().chunk_bytes, pool_->shape().chunk_count, alignment),
        ranges_(*pool_) {}

  [[nodiscard]] loaded_tensors load(request const& wanted, urgency const& how,
                                    handover_report* report);
  bool publish(std::shared_ptr<void> const& hold, std::string key, std::string_view tag);
  void set_in_use(std::shared_ptr<void> const& hold, bool used);
  [[nodiscard]] std::optional<adopted> adopt(request const& wanted, std::string key,
                                             std::string_view tag);
  void release_rest();
  void prepare(std::span<std::uint64_t const> sizes, residence lasts);
  void tidy();

  [[nodiscard]] std::uint64_t hole_bytes() const {
    std::lock_guard const lock{mutex_};
    return places_.held_bytes() - places_.live_bytes();
  }
  [[nodiscard]] counters count() const {
    std::lock_guard const lock{mutex_};
    return counters_;
  }

 private:
  struct placed {
    load_decision made;
    bool noted = false;  ///< whose its chunks are has been said
  };

  /// Unloads a model when it goes, whole or half loaded.
  struct residency {
    residency(std::shared_ptr<impl> heap, model_id number) noexcept
        : in(std::move(heap)), id(number) {}
    residency(residency const&) = delete;
    residency& operator=(residency const&) = delete;
    ~residency() { in->unload(*this); }

    std::shared_ptr<impl> const in;
    model_id const id;
    std::vector<detail::stitched_ranges::range> stitched;
    std::vector<std::uint64_t> sizes;
    load_decision made;
    std::string published;  ///< the key; empty: not
  };

  /// Gives chunks back when it goes.
  struct surplus {
    surplus(chunk_pool& pool, std::vector<std::uint32_t> those) noexcept
        : from(pool), chunks(std::move(those)) {}
    surplus(surplus const&) = delete;
    surplus& operator=(surplus const&) = delete;
    ~surplus() {
      if (!chunks.empty()) {
        from.give_back_chunks(chunks);
      }
    }

    chunk_pool& from;
    std::vector<std::uint32_t> chunks;
  };

  [[nodiscard]] placed decide(model_id id, request const& wanted, urgency const& how,
                              handover_report& report);
  [[nodiscard]] std::optional<load_decision> load_into_free(model_id id, request const& wanted,
                                                            placing_way last);
  [[nodiscard]] placed load_into_acquired(model_id id, request const& wanted, std::uint32_t count,
                                          urgency const& how, handover_report& report);
  [[nodiscard]] std::vector<std::byte*> map(load_decision const& decision,
                                            std::vector<detail::stitched_ranges::range>& stitched);
  void forget_plan(model_id id);
  [[nodiscard]] std::shared_ptr<residency> new_residency(request const& wanted);
  [[nodiscard]] static residency& residency_of(std::shared_ptr<void> const& hold) {
    return *std::static_pointer_cast<residency>(hold);
  }
  void unload(residency& model) noexcept;
  void report_decision(load_decision const& made, bool noted, residency const& by,
                       std::string_view what) noexcept;
  void note(std::vector<std::uint32_t> const& chunks);
  void note(load_decision const& made, std::string_view what);

  std::shared_ptr<serving_pool> const pool_;
  std::uint64_t const alignment_;
  std::mutex loading_;        ///< one load at a time
  mutable std::mutex mutex_;  ///< guards what follows but `ranges_`; held for decisions only
  tensor_placement places_;
  std::map<model_id, std::string> names_;
  model_id next_ = 0;
  counters counters_;
  detail::stitched_ranges ranges_;
};

}  // namespace sluice::memhandover
