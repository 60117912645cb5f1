/// A pool of this process's memory for tests of what stands above a pool: real chunks, mapped and
/// stitched by the host backend and counted as a pool counts them, without a broker or another
/// process. Part of it can be said to be training's, which gives it up when asked.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "tests/patience.hpp"

namespace sluice::server::testing {

class heap_pool final : public memhandover::serving_pool,
                        public std::enable_shared_from_this<heap_pool> {
 public:
  static constexpr std::uint64_t chunk = 4096;

  explicit heap_pool(std::uint32_t chunks, std::uint32_t training = 0)
      : shape_{memhandover::backend_kind::host, -1, chunk, chunks}, owners_(chunks, owner::nobody) {
    std::fill(owners_.end() - training, owners_.end(), owner::training);
    descriptors_.emplace_back(::memfd_create("sluice-test-pool", MFD_CLOEXEC));
    if (::ftruncate(descriptors_[0].get(), static_cast<off_t>(shape_.bytes())) != 0) {
      throw error{error_kind::internal, "no memory for the test's pool"};
    }
    memory_ = memhandover::open_device_memory(shape_, descriptors_);
    std::vector<std::uint32_t> all(chunks);
    std::iota(all.begin(), all.end(), 0U);
    whole_ = memory_->reserve(chunks);
    memory_->map(whole_, all);
  }
  heap_pool(heap_pool const&) = delete;
  heap_pool& operator=(heap_pool const&) = delete;
  ~heap_pool() override {
    memory_->unmap(whole_, shape_.chunk_count);
    memory_->release(whole_, shape_.chunk_count);
  }

  [[nodiscard]] memhandover::pool_shape shape() const override { return shape_; }

  [[nodiscard]] memhandover::pool_usage usage() const override {
    std::lock_guard const lock{mutex_};
    return {.total_bytes = shape_.bytes(),
            .free_bytes = chunk * available(),
            .training_bytes = chunk * count(owner::training),
            .serving_bytes = chunk * count(owner::serving),
            .kept_bytes = chunk * kept_};
  }

  /// Contiguous memory is stitched, always.
  [[nodiscard]] memhandover::placement acquire(std::uint64_t bytes,
                                               std::chrono::steady_clock::time_point deadline,
                                               memhandover::handover_report* report,
                                               std::string_view /*what*/) override {
    auto const wanted = static_cast<std::uint32_t>((bytes + chunk - 1) / chunk);
    auto chunks = acquire_chunks(wanted, deadline, report);
    auto* const data = stitch(chunks);
    auto give_back = [self = shared_from_this(), chunks](std::byte* where) {
      self->unstitch(where, static_cast<std::uint32_t>(chunks.size()));
      self->give_back_chunks(chunks);
    };
    return {std::shared_ptr<std::byte>{data, std::move(give_back)}, data, wanted * chunk};
  }

  void watch_engines(std::function<void(bool, bool)> hears) override {
    std::lock_guard const lock{mutex_};
    engines_heard_by_ = std::move(hears);
  }
  /// As an engine's work would.
  void engine_works(bool works, bool waited = true) {
    auto const hears = [this] {
      std::lock_guard const lock{mutex_};
      return engines_heard_by_;
    }();
    hears(works, waited);
  }

  [[nodiscard]] std::vector<std::uint32_t> free_chunks() const override {
    std::lock_guard const lock{mutex_};
    std::vector<std::uint32_t> result;
    for (std::uint32_t i = 0; i < owners_.size() && !failure_ && !short_; ++i) {
      if (owners_[i] == owner::nobody && result.size() < available()) {
        result.push_back(i);
      }
    }
    return result;
  }

  [[nodiscard]] bool take_chunks(std::span<std::uint32_t const> chunks) override {
    std::lock_guard const lock{mutex_};
    fail_if_due();
    if (lose_races_ > 0) {  // training is granted one of them in between
      --lose_races_;
      return false;
    }
    for (auto const each : chunks) {
      if (owners_.at(each) != owner::nobody) {
        return false;
      }
    }
    set(chunks, owner::serving);
    return true;
  }

  [[nodiscard]] std::vector<std::uint32_t> acquire_chunks(
      std::uint32_t wanted, memhandover::urgency const& how, memhandover::handover_report* report,
      foresight const& meanwhile = {}) override {
    if (meanwhile) {
      meanwhile(foresee(wanted));
    }
    if (how.is_spare) {
      check_spare(wanted, how.called_off);
    }
    std::lock_guard const lock{mutex_};
    fail_if_due();
    ++acquisitions_;
    short_ = failure_ == error_kind::out_of_memory;
    if (failure_) {
      throw error{*std::exchange(failure_, std::nullopt), "training keeps it"};
    }
    if (is_due() && available() < wanted) {
      throw error{error_kind::out_of_memory, "what is free is owed to a job", owed_->stay};
    }
    auto const taken = choose(wanted);
    if (taken.size() < wanted) {
      throw error{error_kind::out_of_memory, "too little can be had"};
    }
    auto const reclaimed = chunk * static_cast<std::uint64_t>(std::count_if(
                                       taken.begin(), taken.end(), [this](std::uint32_t each) {
                                         return owners_[each] == owner::training;
                                       }));
    set(taken, owner::serving);
    if (report != nullptr) {
      report->bytes = wanted * chunk;
      report->bytes_reclaimed = reclaimed;
      report->total = std::chrono::microseconds{7};
    }
    return taken;
  }

  void give_back_chunks(std::span<std::uint32_t const> chunks) override {
    std::lock_guard const lock{mutex_};
    for (auto const each : chunks) {
      wrongly_given_back_ += owners_.at(each) == owner::serving ? 0 : 1;
    }
    set(chunks, owner::nobody);
    changed_.notify_all();
  }

  [[nodiscard]] std::byte* whole_view() const noexcept override { return whole_; }
  [[nodiscard]] std::byte* stitch(std::span<std::uint32_t const> chunks) override {
    {
      std::lock_guard const lock{mutex_};
      fail_if_due();
    }
    auto* const where = memory_->reserve(static_cast<std::uint32_t>(chunks.size()));
    memory_->map(where, chunks);
    std::lock_guard const lock{mutex_};
    ++stitched_;
    return where;
  }
  void unstitch(std::byte* where, std::uint32_t count) noexcept override {
    memory_->unmap(where, count);
    memory_->release(where, count);
    std::lock_guard const lock{mutex_};
    --stitched_;
  }
  void note_chunks(std::span<std::uint32_t const> chunks, std::string_view what) override {
    std::lock_guard const lock{mutex_};
    fail_if_due();
    for (auto const each : chunks) {
      notes_[each] = what;
    }
  }
  void record_use(std::span<std::uint32_t const> chunks, std::byte const* where,
                  std::string_view what) override {
    std::lock_guard const lock{mutex_};
    fail_if_due();
    uses_.push_back({{chunks.begin(), chunks.end()}, where, std::string{what}});
  }

  [[nodiscard]] std::optional<memhandover::owed_memory> owed() const override {
    std::lock_guard const lock{mutex_};
    auto made = owed_;
    if (made) {
      made->missing_bytes -= std::min(made->missing_bytes, chunk * count(owner::nobody));
    }
    return made && made->missing_bytes > 0 ? made : std::nullopt;
  }

  void gather_owed(std::chrono::steady_clock::time_point /*deadline*/) override {}
  /// From then on a job needs memory, which those that have it give when the call of that number comes; calls before it last
  /// until they are called off.
  void set_needed(int comes_with) {
    std::lock_guard const lock{mutex_};
    need_comes_with_ = comes_with;
  }
  [[nodiscard]] bool is_needed() const override {
    std::lock_guard const lock{mutex_};
    return gatherings_ < need_comes_with_;
  }
  bool gather_needed(std::chrono::steady_clock::time_point /*deadline*/,
                     std::stop_token called_off) override {
    std::stop_callback const wakes{called_off, [this] {
                                     { std::lock_guard const held{mutex_}; }
                                     changed_.notify_all();
                                   }};
    std::unique_lock lock{mutex_};
    bool const comes = ++gatherings_ >= need_comes_with_;
    changed_.notify_all();
    if (!comes && changed_.wait_for(lock, patience, [&] { return called_off.stop_requested(); })) {
      throw error{error_kind::cancelled, "called off"};
    }
    return comes;
  }
  [[nodiscard]] bool wait_for_gatherings(int count) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return gatherings_ >= count; });
  }
  void set_reserve(std::uint64_t bytes) override {
    std::lock_guard const lock{mutex_};
    reserve_ = bytes;
    changed_.notify_all();
  }

  void set_run_ahead(std::chrono::nanoseconds bound) override {
    std::lock_guard const lock{mutex_};
    run_ahead_ = bound;
    changed_.notify_all();
  }

  void announce_compute(std::chrono::nanoseconds within) override {
    ++announcements_;
    announced_within_ = within;
  }
  [[nodiscard]] std::chrono::nanoseconds announced_within() const noexcept {
    return announced_within_;
  }
  [[nodiscard]] int announcements() const noexcept { return announcements_; }

  [[nodiscard]] memhandover::compute_claim claim_compute(
      std::chrono::steady_clock::time_point until) override {
    std::lock_guard const lock{mutex_};
    if (failing_claims_ > 0) {
      --failing_claims_;
      throw error{error_kind::unavailable, "there is no claim"};
    }
    claimed_until_ = until;
    ++claims_;
    ++claims_ever_;
    changed_.notify_all();
    return memhandover::compute_claim{
        std::shared_ptr<void>{nullptr, [self = shared_from_this()](void*) {
                                std::lock_guard const held{self->mutex_};
                                --self->claims_;
                                self->changed_.notify_all();
                              }}};
  }

  /// A job is parked that needs so many chunks, from `at` on.
  void set_owed(std::uint32_t chunks, std::chrono::steady_clock::time_point at,
                std::chrono::milliseconds stay) {
    std::lock_guard const lock{mutex_};
    owed_ = memhandover::owed_memory{at, chunks * chunk, stay};
  }
  /// It gets what it is owed, when that is free.
  [[nodiscard]] bool wait_until_met() {
    std::unique_lock lock{mutex_};
    auto const met = [&] { return chunk * count(owner::nobody) >= owed_->missing_bytes; };
    if (!changed_.wait_for(lock, patience, met)) {
      return false;
    }
    auto left = owed_->missing_bytes / chunk;
    for (auto& each : owners_) {
      if (each == owner::nobody && left > 0) {
        each = owner::training;
        --left;
      }
    }
    owed_.reset();
    return true;
  }
  /// So many chunks of training's are had by parking it alone.
  void park_for(std::uint32_t chunks) {
    std::lock_guard const lock{mutex_};
    parkable_ = chunks;
  }
  /// Training does not answer who asks for memory that nobody waits for.
  void ignore_spare() {
    std::lock_guard const lock{mutex_};
    ignores_spare_ = true;
  }
  /// How often such memory was asked for.
  [[nodiscard]] bool wait_for_spare(int times) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return spare_ >= times; });
  }
  /// So many chunks of training's are kept from whoever demands them.
  void keep(std::uint32_t chunks) {
    std::lock_guard const lock{mutex_};
    kept_ = chunks;
  }
  /// The next memory that is wanted is not free, and training does not give it. Nothing is free until
  /// training has been asked again.
  void fail_next(error_kind kind) {
    std::lock_guard const lock{mutex_};
    failure_ = kind;
  }
  /// That call from now on which asks this pool for something, or tells it something, finds no memory to do it with.
  void fail_call(int which) {
    std::lock_guard const lock{mutex_};
    calls_left_ = which;
  }
  /// Whether one has; none does from now on.
  [[nodiscard]] bool call_failed() {
    std::lock_guard const lock{mutex_};
    return std::exchange(calls_left_, 0) == 0;
  }
  /// Chunks that were given back by somebody who did not have them.
  [[nodiscard]] int wrongly_given_back() const {
    std::lock_guard const lock{mutex_};
    return wrongly_given_back_;
  }
  /// What training will give is foreseen wrongly.
  void foresee_wrongly() {
    std::lock_guard const lock{mutex_};
    foresees_wrongly_ = true;
  }
  /// So many times chunks that were free are gone when they are to be taken.
  void lose_races(int times) {
    std::lock_guard const lock{mutex_};
    lose_races_ = times;
  }
  [[nodiscard]] int claims() const {
    std::lock_guard const lock{mutex_};
    return claims_;
  }
  [[nodiscard]] int claims_ever() const {
    std::lock_guard const lock{mutex_};
    return claims_ever_;
  }
  /// The last that was set; zero if none was.
  [[nodiscard]] std::chrono::nanoseconds run_ahead() const {
    std::lock_guard const lock{mutex_};
    return run_ahead_;
  }
  [[nodiscard]] bool wait_for_run_ahead_above(std::chrono::nanoseconds bound) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return run_ahead_ > bound; });
  }
  /// So many claims fail.
  void fail_claims(int times) {
    std::lock_guard const lock{mutex_};
    failing_claims_ = times;
  }
  /// Of the latest claim.
  [[nodiscard]] std::chrono::steady_clock::time_point claimed_until() const {
    std::lock_guard const lock{mutex_};
    return claimed_until_;
  }
  /// How often training could have been asked.
  [[nodiscard]] int acquisitions() const {
    std::lock_guard const lock{mutex_};
    return acquisitions_;
  }
  /// Stitched ranges that are mapped.
  [[nodiscard]] int stitched() const {
    std::lock_guard const lock{mutex_};
    return stitched_;
  }
  struct use {
    std::vector<std::uint32_t> chunks;
    std::byte const* where;  ///< null: in the whole view
    std::string what;
  };
  /// What has begun to use chunks, in its order.
  [[nodiscard]] std::vector<use> uses() const {
    std::lock_guard const lock{mutex_};
    return uses_;
  }
  [[nodiscard]] std::string note(std::uint32_t number) const {
    std::lock_guard const lock{mutex_};
    auto const found = notes_.find(number);
    return found == notes_.end() ? "" : found->second;
  }
  /// Whether this many claims are held before patience ends.
  [[nodiscard]] bool wait_for_claims(int claims) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return claims_ == claims; });
  }
  [[nodiscard]] bool wait_for_serving(std::uint64_t bytes) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience,
                             [&] { return chunk * count(owner::serving) == bytes; });
  }
  [[nodiscard]] bool wait_for_reserve(std::uint64_t bytes) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return reserve_ == bytes; });
  }

 private:
  enum class owner : unsigned char { nobody, training, serving };

  [[nodiscard]] bool is_due() const {
    return owed_ && owed_->at <= std::chrono::steady_clock::now();
  }
  /// Free, and nobody's due.
  [[nodiscard]] std::uint64_t available() const {
    auto const free = count(owner::nobody);
    return is_due() ? free - std::min(free, owed_->missing_bytes / chunk) : free;
  }
  /// As `urgency` says.
  void check_spare(std::uint32_t wanted, std::stop_token const& called_off) {
    std::stop_callback const wakes{called_off, [this] {
                                     { std::lock_guard const held{mutex_}; }
                                     changed_.notify_all();
                                   }};
    std::unique_lock lock{mutex_};
    ++spare_;
    changed_.notify_all();
    auto const of_training =
        count(owner::training) - std::min<std::uint64_t>(count(owner::training), kept_ + parkable_);
    if (owed_ || available() + of_training < wanted) {
      throw error{error_kind::out_of_memory, "nobody is parked for it"};
    }
    changed_.wait(lock, [&] { return !ignores_spare_ || called_off.stop_requested(); });
    if (called_off.stop_requested()) {
      throw error{error_kind::cancelled, "others want memory"};
    }
  }
  void fail_if_due() {
    if (calls_left_ > 0 && --calls_left_ == 0) {
      throw std::bad_alloc{};
    }
  }
  [[nodiscard]] std::uint64_t count(owner who) const {
    return static_cast<std::uint64_t>(std::count(owners_.begin(), owners_.end(), who));
  }
  [[nodiscard]] std::vector<std::uint32_t> choose(std::uint32_t wanted) const {
    std::vector<std::uint32_t> chosen;
    for (auto const from : {owner::nobody, owner::training}) {
      for (std::uint32_t i = 0; i < owners_.size() && chosen.size() < wanted; ++i) {
        if (owners_[i] == from) {
          chosen.push_back(i);
        }
      }
    }
    std::sort(chosen.begin(), chosen.end());
    return chosen;
  }
  /// What `choose` will say, or the last chunks.
  [[nodiscard]] std::vector<std::uint32_t> foresee(std::uint32_t wanted) const {
    std::lock_guard const lock{mutex_};
    if (!foresees_wrongly_) {
      return choose(wanted);
    }
    std::vector<std::uint32_t> last(std::min<std::size_t>(wanted, owners_.size()));
    std::iota(last.begin(), last.end(), static_cast<std::uint32_t>(owners_.size() - last.size()));
    return last;
  }
  void set(std::span<std::uint32_t const> chunks, owner who) {
    for (auto const each : chunks) {
      owners_.at(each) = who;
    }
  }

  memhandover::pool_shape const shape_;
  memhandover::pool_descriptors descriptors_;
  std::unique_ptr<memhandover::device_memory> memory_;
  std::byte* whole_ = nullptr;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::function<void(bool, bool)> engines_heard_by_;
  std::vector<owner> owners_;
  std::map<std::uint32_t, std::string> notes_;
  std::vector<use> uses_;
  std::uint64_t reserve_ = 0;
  int claims_ = 0;
  int claims_ever_ = 0;
  std::chrono::steady_clock::time_point claimed_until_;
  int acquisitions_ = 0;
  int stitched_ = 0;
  int lose_races_ = 0;
  int failing_claims_ = 0;
  std::atomic<int> announcements_{0};
  std::atomic<std::chrono::nanoseconds> announced_within_{};
  std::chrono::nanoseconds run_ahead_{0};
  int calls_left_ = 0;
  int wrongly_given_back_ = 0;
  bool foresees_wrongly_ = false;
  std::uint32_t kept_ = 0;
  std::uint32_t parkable_ = 0;
  bool ignores_spare_ = false;
  int spare_ = 0;
  int need_comes_with_ = 0;
  int gatherings_ = 0;                            // of what a job needs
  std::optional<memhandover::owed_memory> owed_;  // `missing_bytes`: all that it needs
  std::optional<error_kind> failure_;
  bool short_ = false;  // the last acquisition failed for want of memory: nothing is free
};

}  // namespace sluice::server::testing
