#include "memhandover/broker/detail/copy_keeper.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/device/host_room.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace sluice::memhandover::detail {
namespace {

using namespace sluice::literals;

/// Some milliseconds of zeroing.
constexpr std::uint64_t step_bytes = 64_MiB;
/// What is left to others where copies are made present.
constexpr std::uint64_t headroom = 256_MiB;
constexpr std::chrono::seconds between_looks{1};

/// Makes pages present without changing what is in them; the reason why not, if so.
std::optional<std::string> make_present(int fd, std::uint64_t from, std::uint64_t bytes) {
  auto* const at =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(from));
  bool present = at != MAP_FAILED && ::madvise(at, bytes, MADV_POPULATE_WRITE) == 0;
  if (at != MAP_FAILED) {
    ::munmap(at, bytes);
  }
  // Before Linux 5.14 the pages are at least kept for it.
  present = present || ::fallocate(fd, 0, static_cast<off_t>(from), static_cast<off_t>(bytes)) == 0;
  return present ? std::nullopt : std::optional{reason_of(errno)};
}

}  // namespace

copy_keeper::~copy_keeper() {
  {
    std::lock_guard const lock{mutex_};
    stop_ = true;
  }
  stopping_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void copy_keeper::adopt(host_copy_files files) {
  if (table_) {
    return;
  }
  host_copy_table table{files.table.get()};
  table_.emplace(std::move(table));
  files_ = std::move(files);
  spdlog::info("adopted host copies of an earlier broker bytes={}", table_->bytes());
  begin_populating();
}

void copy_keeper::make_for(pool_shape const& shape, std::uint64_t promised_bytes) {
  if (shape.backend != backend_kind::cuda || table_ || budget_ == 0) {
    return;
  }
  auto const room = read_host_room();
  if (budget_ > room.most - std::min(room.most, promised_bytes)) {
    throw error{error_kind::out_of_memory, "host copies are to have " + format_bytes(budget_) +
                                               ", but there can be " + format_bytes(room.most) +
                                               " at most (" + room.most_set_by + ")"};
  }
  auto files = create_host_copies(budget_, shape.chunk_bytes);
  table_.emplace(files.table.get());
  files_ = std::move(files);
  begin_populating();
}

void copy_keeper::pool_came(std::uint64_t pool_id, pool_shape const& shape) {
  if (shape.backend != backend_kind::cuda || !table_) {
    return;
  }
  if (table_->header().slot_bytes != shape.chunk_bytes) {
    spdlog::warn("a pool has chunks of another size than host copies have; it has none pool=\"{}\"",
                 name_of(shape));
  } else if (!place_of_pool(table_->header(), pool_id)) {
    spdlog::warn("there is no place for another pool in the table of host copies pool=\"{}\"",
                 name_of(shape));
  }
}

std::optional<std::uint32_t> copy_keeper::place_of(std::uint64_t pool_id) const noexcept {
  for (std::uint32_t place = 0; table_ && place < host_copy_pools; ++place) {
    if (table_->header().pools[place].load(std::memory_order_acquire) == pool_id) {
      return place;
    }
  }
  return std::nullopt;
}

void copy_keeper::clear_place(std::uint32_t place) {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    table_->copies().sweep(copy_holder(place, slot));
  }
  table_->header().pools[place].store(0, std::memory_order_release);
}

void copy_keeper::pool_went(std::uint64_t pool_id) {
  if (auto const place = place_of(pool_id)) {
    clear_place(*place);
  }
}

void copy_keeper::forget_others(std::span<std::uint64_t const> pool_ids) {
  for (std::uint32_t place = 0; table_ && place < host_copy_pools; ++place) {
    auto const id = table_->header().pools[place].load(std::memory_order_acquire);
    if (id != 0 && std::find(pool_ids.begin(), pool_ids.end(), id) == pool_ids.end()) {
      clear_place(place);
    }
  }
}

std::optional<copy_share> copy_keeper::share_of(std::uint64_t pool_id, std::uint32_t slot) const {
  auto const place = place_of(pool_id);
  if (!place) {
    return std::nullopt;
  }
  return copy_share{files_.bytes.get(), files_.table.get(), table_->bytes(),
                    table_->header().slot_bytes, copy_holder(*place, slot)};
}

std::uint32_t copy_keeper::sweep(std::uint64_t pool_id, std::uint32_t slot) {
  auto const place = place_of(pool_id);
  return place ? table_->copies().sweep(copy_holder(*place, slot)) : 0;
}

std::uint64_t copy_keeper::untouched_bytes() const noexcept {
  return table_ ? table_->bytes() - std::min(table_->bytes(), table_->header().populated.load())
                : 0;
}

nlohmann::json copy_keeper::describe(std::uint64_t pool_id) const {
  if (!place_of(pool_id)) {
    return nullptr;
  }
  nlohmann::json said{{"bytes", table_->bytes()},
                      {"free_bytes", table_->copies().count().free * table_->header().slot_bytes},
                      {"populated_bytes", table_->bytes() - untouched_bytes()}};
  std::lock_guard const lock{mutex_};
  said["warning"] = shortage_.empty() ? nlohmann::json{} : nlohmann::json(shortage_);
  return said;
}

void copy_keeper::begin_populating() {
  if (untouched_bytes() == 0) {
    return;
  }
  try {
    thread_ = std::thread{[this] { populate(); }};
  } catch (std::system_error const& why) {
    spdlog::warn("host copies are made present as they are used reason=\"{}\"", why.what());
  }
}

void copy_keeper::populate() {
  ::pthread_setname_np(::pthread_self(), "sluice-copies");
  auto const all = table_->bytes();
  auto& populated = table_->header().populated;
  std::unique_lock lock{mutex_};
  for (auto from = populated.load(); from < all && !stop_; from = populated.load()) {
    lock.unlock();
    auto const step = std::min(step_bytes, all - from);
    auto const room = read_host_room();
    std::optional<std::string> why;
    if (room.available < step + headroom) {
      why = "the host has " + format_bytes(room.available) + " available (" +
            room.available_set_by + "), and " + format_bytes(all - from) +
            " of host copies are still to be made present";
    } else {
      why = make_present(files_.bytes.get(), from, step);
    }
    lock.lock();
    shortage_ = why.value_or("");
    if (why) {
      stopping_.wait_for(lock, between_looks, [this] { return stop_; });
    } else {
      populated.store(from + step);
    }
  }
}

}  // namespace sluice::memhandover::detail
