#include "runtime/server/hosting/activation_memory.hpp"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::server {
namespace {

constexpr std::uint64_t alignment = 512;
/// How long training may take to answer; it answers in less than a millisecond.
constexpr std::chrono::seconds patience{5};
/// Kept memory is used again for what needs at least so much of it.
constexpr double least_use = 0.75;

}  // namespace

activation_memory::activation_memory(std::shared_ptr<memhandover::serving_pool> pool, freed then)
    : pool_(std::move(pool)), keeps_(then == freed::kept), heap_(pool_, alignment) {}

std::byte* activation_memory::allocate(std::uint64_t bytes) {
  auto found = take_kept(bytes);
  std::unique_lock obtains{obtaining_, std::defer_lock};
  if (!found) {
    obtains.lock();
  }
  while (!found) {
    try {
      found = obtain(bytes);
    } catch (error const& failure) {
      if (failure.kind() != error_kind::out_of_memory || !empty_kept()) {
        throw;
      }
    }
  }
  auto* const address = found->at();
  std::lock_guard const lock{mutex_};
  live_.emplace(address, std::move(*found));
  return address;
}

std::optional<activation_memory::piece> activation_memory::take_kept(std::uint64_t bytes) {
  std::lock_guard const lock{mutex_};
  auto const found = kept_.lower_bound(bytes);
  if (found == kept_.end() ||
      static_cast<double>(found->first) * least_use > static_cast<double>(bytes)) {
    return std::nullopt;
  }
  auto result = std::move(found->second);
  kept_.erase(found);
  result.bytes = bytes;
  return result;
}

activation_memory::piece activation_memory::obtain(std::uint64_t bytes) {
  auto const usage = pool_->usage();
  auto const fits = usage.total_bytes - usage.kept_bytes;
  if (bytes > fits) {  // asking training in vain would cost it a micro-batch
    throw error{error_kind::out_of_memory,
                fmt::format("a computation needs {} at once, but the pool has {} for inference; "
                            "make pool.memory larger, or the inputs smaller",
                            format_bytes(bytes), format_bytes(fits))};
  }
  std::array<std::uint64_t, 1> const sizes{bytes};
  try {
    return {heap_.load({.sizes = sizes, .what = "activations"},
                       std::chrono::steady_clock::now() + patience),
            bytes};
  } catch (error const& failure) {
    throw error{
        failure.kind(),
        fmt::format("a computation needs {} beside the {} that computations have already: {}",
                    format_bytes(bytes), format_bytes(live_bytes()), failure.what())};
  }
}

std::uint64_t activation_memory::live_bytes() const {
  std::lock_guard const lock{mutex_};
  std::uint64_t sum = 0;
  for (auto const& [address, of] : live_) {
    sum += of.bytes;
  }
  return sum;
}

bool activation_memory::free(std::byte const* address) noexcept {
  std::map<std::byte const*, piece>::node_type gone;  // its memory goes without the lock
  std::lock_guard const lock{mutex_};
  gone = live_.extract(address);
  if (gone.empty()) {
    return false;
  }
  if (keeps_) {
    try {
      auto const size = gone.mapped().memory.bytes();
      kept_.emplace(size, std::move(gone.mapped()));
    } catch (std::bad_alloc const&) {  // then it goes back to the pool
    }
  }
  return true;
}

std::optional<activation_memory::extent> activation_memory::containing(
    std::byte const* address) const {
  std::lock_guard const lock{mutex_};
  auto found = live_.upper_bound(address);
  if (found == live_.begin()) {
    return std::nullopt;
  }
  --found;
  auto const& [base, of] = *found;
  if (address >= base + of.bytes) {
    return std::nullopt;
  }
  return extent{of.at(), of.bytes};
}

bool activation_memory::give_back() {
  // Who obtains memory may have to wait for training, and gives back what is kept if he finds too little.
  std::unique_lock const alone{obtaining_, std::try_to_lock};
  return alone.owns_lock() && empty_kept();
}

bool activation_memory::empty_kept() {
  std::multimap<std::uint64_t, piece> gone;
  {
    std::lock_guard const lock{mutex_};
    gone.swap(kept_);
  }
  bool const any = !gone.empty();
  gone.clear();
  heap_.tidy();
  return any;
}

std::uint64_t activation_memory::kept_bytes() const {
  std::lock_guard const lock{mutex_};
  std::uint64_t sum = 0;
  for (auto const& [bytes, of] : kept_) {
    sum += bytes;
  }
  return sum;
}

}  // namespace sluice::server
