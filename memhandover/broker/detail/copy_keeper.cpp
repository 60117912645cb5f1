#include "memhandover/broker/detail/copy_keeper.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/device/disk_file.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace sluice::memhandover::detail {
namespace {

using namespace sluice::literals;

/// Some milliseconds of zeroing.
constexpr std::uint64_t step_bytes = 64_MiB;
constexpr std::chrono::seconds between_looks{1};

places_of_pools places_in(host_copies_header const& header) {
  places_of_pools places{};
  for (std::uint32_t place = 0; place < host_copy_pools; ++place) {
    auto const id = header.pools[place].load();
    if (id != 0 && std::find(places.begin(), places.end(), id) != places.end()) {
      throw error{error_kind::internal,
                  "the table of host copies is damaged: a pool has two places in it"};
    }
    places.at(place) = id;
  }
  return places;
}

void check_holder(places_of_pools const& places, std::uint64_t pool_id, std::uint32_t slot,
                  std::uint32_t holder) {
  auto const found = std::find(places.begin(), places.end(), pool_id);
  auto const place = static_cast<std::uint32_t>(found - places.begin());
  if (found == places.end() || copy_holder(place, slot) != holder) {
    throw error{error_kind::invalid_argument,
                "their table has " +
                    (found == places.end()
                         ? "no place of its pool"
                         : "the client as holder " + std::to_string(copy_holder(place, slot))) +
                    ", but it takes itself for holder " + std::to_string(holder)};
  }
}

nlohmann::json describe_slots(copy_counts const& counted, std::uint64_t bytes,
                              std::uint64_t slot_bytes) {
  return {{"bytes", bytes},
          {"free_bytes", counted.free * slot_bytes},
          {"held_bytes", counted.held * slot_bytes},
          {"kept_bytes", counted.kept * slot_bytes},
          {"damaged_bytes", counted.damaged * slot_bytes}};
}

/// Makes pages present without changing what is in them; the reason why not, if so.
std::optional<std::string> make_present(int fd, std::uint64_t from, std::uint64_t bytes) {
  auto* const at =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(from));
  bool const present = at != MAP_FAILED && ::madvise(at, bytes, MADV_POPULATE_WRITE) == 0;
  if (at != MAP_FAILED) {
    ::munmap(at, bytes);
  }
  // Before Linux 5.14 the pages are at least kept for it.
  if (present || ::fallocate(fd, 0, static_cast<off_t>(from), static_cast<off_t>(bytes)) == 0) {
    return std::nullopt;
  }
  return std::strerror(errno);
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

void copy_keeper::make_for(pool_shape const& shape, std::uint64_t pool_bytes) {
  auto const budget = options_.budget;
  if (table_ || budget == 0) {
    return;
  }
  (void)host_copy_slots(budget, shape.chunk_bytes);  // throws for a budget that makes none
  auto const disk_slots = disk_copy_slots(options_.disk.bytes, shape.chunk_bytes);
  auto const room = options_.room();
  if (auto const why = refusal_of_host_copies(budget, shape.chunk_bytes, pool_bytes, room)) {
    throw error{error_kind::out_of_memory, *why};
  }
  if (auto const why = shortage_of_host_copies(budget, room)) {
    spdlog::warn("{}", *why);
  }
  auto disk = disk_slots == 0
                  ? unique_fd{}
                  : create_disk_file({options_.disk.folder, disk_slots * shape.chunk_bytes});
  try {
    auto files = create_host_copies(budget, shape.chunk_bytes, std::move(disk));
    host_copy_table table{files};
    use(std::move(files), std::move(table));
  } catch (error const& why) {
    failure_ = "there are none: " + std::string{why.what()};
    spdlog::warn("the broker goes on without host copies reason=\"{}\"", why.what());
  }
}

void copy_keeper::use(host_copy_files files, host_copy_table table) {
  table_.emplace(std::move(table));
  files_ = std::move(files);
  failure_.clear();
  for (auto& pool : pools_) {
    give_place(pool);
  }
  begin_populating();
}

void copy_keeper::adopt(host_copy_files files, std::uint64_t pool_id, std::uint32_t slot,
                        std::uint32_t holder) {
  if (table_ && !same_memory(files, files_)) {
    throw error{error_kind::invalid_argument, "they are not those that this broker keeps"};
  }
  if (!table_) {
    host_copy_table table{files};
    auto const places = places_in(table.header());
    check_holder(places, pool_id, slot, holder);
    places_ = places;
    use(std::move(files), std::move(table));
    tidy();
    spdlog::info("adopted host copies of an earlier broker bytes={} disk_bytes={}",
                 table_->shape().bytes(), table_->shape().disk_bytes());
  }
  check_holder(places_, pool_id, slot, holder);
}

void copy_keeper::pool_came(std::uint64_t pool_id, pool_shape const& shape) {
  pools_.push_back({pool_id, name_of(shape), shape.chunk_bytes, {}});
  if (table_) {
    give_place(pools_.back());
  }
}

void copy_keeper::give_place(known_pool& pool) {
  auto const slot_bytes = table_->shape().slot_bytes;
  if (slot_bytes != pool.chunk_bytes) {
    if (auto const place = place_of(pool.id)) {
      set_place(*place, 0);  // only a damaged table has one
    }
    pool.without = "there are none for its chunks of " + format_bytes(pool.chunk_bytes) +
                   ": those of this broker have slots of " + format_bytes(slot_bytes);
  } else if (!place_of(pool.id)) {
    auto const empty = std::find(places_.begin(), places_.end(), 0U);
    if (empty != places_.end()) {
      set_place(static_cast<std::uint32_t>(empty - places_.begin()), pool.id);
    } else {
      pool.without = "there is no place for another pool in their table, which has " +
                     std::to_string(host_copy_pools);
    }
  }
  if (!pool.without.empty()) {
    spdlog::warn("a pool has no host copies pool=\"{}\" reason=\"{}\"", pool.name, pool.without);
  }
}

void copy_keeper::set_place(std::uint32_t place, std::uint64_t pool_id) {
  places_.at(place) = pool_id;
  table_->header().pools[place].store(pool_id, std::memory_order_release);
}

std::optional<std::uint32_t> copy_keeper::place_of(std::uint64_t pool_id) const noexcept {
  auto const found = std::find(places_.begin(), places_.end(), pool_id);
  return found == places_.end() || !table_
             ? std::nullopt
             : std::optional{static_cast<std::uint32_t>(found - places_.begin())};
}

bool copy_keeper::is_here(std::uint64_t pool_id) const noexcept {
  return std::any_of(pools_.begin(), pools_.end(),
                     [pool_id](auto const& pool) { return pool.id == pool_id; });
}

bool copy_keeper::awaits_pools() const noexcept {
  return std::any_of(places_.begin(), places_.end(),
                     [this](auto id) { return id != 0 && !is_here(id); });
}

bool copy_keeper::any_lives(std::uint64_t pool_id) const {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (options_.lives(pool_id, slot)) {
      return true;
    }
  }
  return false;
}

void copy_keeper::pool_went(std::uint64_t pool_id) {
  std::erase_if(pools_, [pool_id](auto const& pool) { return pool.id == pool_id; });
  if (auto const place = place_of(pool_id)) {
    table_->copies().sweep([place](auto holder) { return pool_place_of(holder) == *place; });
    set_place(*place, 0);
  }
}

void copy_keeper::tidy() {
  if (!table_) {
    return;
  }
  for (std::uint32_t place = 0; place < host_copy_pools; ++place) {
    if (auto const id = places_.at(place); id != 0 && !is_here(id) && !any_lives(id)) {
      set_place(place, 0);
    }
  }
  table_->copies().sweep([this](auto holder) {
    auto const id = places_.at(pool_place_of(holder));
    return id == 0 || !options_.lives(id, client_slot_of(holder));
  });
}

std::optional<copy_share> copy_keeper::share_of(std::uint64_t pool_id, std::uint32_t slot) const {
  auto const place = place_of(pool_id);
  if (!place) {
    return std::nullopt;
  }
  auto const& shape = table_->shape();
  return copy_share{files_.bytes.get(), files_.table.get(), files_.disk.get(),        shape.bytes(),
                    shape.disk_bytes(), shape.slot_bytes,   copy_holder(*place, slot)};
}

std::uint32_t copy_keeper::sweep(std::uint64_t pool_id, std::uint32_t slot) {
  auto const place = place_of(pool_id);
  if (!place) {
    return 0;
  }
  auto const dead = copy_holder(*place, slot);
  auto const freed = table_->copies().sweep([dead](auto holder) { return holder == dead; });
  note_damage(table_->copies().count());
  return freed;
}

/// Such a slot is nobody's until the broker ends.
void copy_keeper::note_damage(copy_counts const& counted) {
  if (counted.damaged > 0 && !std::exchange(damage_noted_, true)) {
    spdlog::warn(
        "the table of host copies is damaged; its slots that say nothing are not used slots={}",
        counted.damaged);
  }
}

std::uint64_t copy_keeper::untouched_bytes() const noexcept {
  return table_ ? memhandover::untouched_bytes(files_.bytes.get(), table_->shape().bytes()) : 0;
}

nlohmann::json copy_keeper::describe(std::uint64_t pool_id) {
  auto const pool = std::find_if(pools_.begin(), pools_.end(),
                                 [pool_id](auto const& each) { return each.id == pool_id; });
  if (pool == pools_.end() || (!table_ && failure_.empty())) {
    return nullptr;
  }
  host_copies_shape shape;
  copy_counts in_memory;
  copy_counts on_disk;
  auto warning = table_ ? pool->without : failure_;
  if (place_of(pool_id)) {
    shape = table_->shape();
    in_memory = table_->copies().count(copy_place::memory);
    on_disk = table_->copies().count(copy_place::disk);
    note_damage(in_memory);
    note_damage(on_disk);
    warning = shortage();
    if (auto const damaged = in_memory.damaged + on_disk.damaged; damaged > 0) {
      warning += (warning.empty() ? "" : "; ") + std::to_string(damaged) +
                 " of their slots are damaged and not used";
    }
  }
  auto described = describe_slots(in_memory, shape.bytes(), shape.slot_bytes);
  described["populated_bytes"] = shape.bytes() - std::min(shape.bytes(), untouched_bytes());
  described["disk"] = shape.disk_slots == 0
                          ? nlohmann::json{}
                          : describe_slots(on_disk, shape.disk_bytes(), shape.slot_bytes);
  described["warning"] = warning.empty() ? nlohmann::json{} : nlohmann::json(warning);
  return described;
}

std::string copy_keeper::shortage() const {
  std::lock_guard const lock{mutex_};
  return shortage_;
}

void copy_keeper::begin_populating() {
  try {
    thread_ = std::thread{[this] { populate(); }};
  } catch (std::system_error const& why) {
    spdlog::warn("host copies are made present as they are used reason=\"{}\"", why.what());
  }
}

/// Of an earlier broker's some pages are there; to make them present once more costs no room.
void copy_keeper::populate() {
  ::pthread_setname_np(::pthread_self(), "sluice-copies");
  auto const all = table_->shape().bytes();
  auto& shown = table_->header().populated;
  std::unique_lock lock{mutex_};
  for (std::uint64_t from = 0; from < all && !stop_;) {
    lock.unlock();
    auto const missing = untouched_bytes();
    auto const step = missing == 0 ? all - from : std::min(step_bytes, all - from);
    auto const room = options_.room();
    std::optional<std::string> why;
    if (missing > 0 && room.available < std::min(step, missing) + host_copies_headroom) {
      why = "the host has " + format_bytes(room.available) + " available (" +
            room.available_set_by + ")";
    } else if (missing > 0) {
      why = make_present(files_.bytes.get(), from, step);
    }
    lock.lock();
    shortage_ = why ? *why + "; " + format_bytes(missing) +
                          " of the host copies are still to be made present"
                    : "";
    if (why) {
      stopping_.wait_for(lock, between_looks, [this] { return stop_; });
      continue;
    }
    from += step;
    if (auto const now = shown.load(); now < from || now > all) {
      shown.store(from);
    }
  }
}

}  // namespace sluice::memhandover::detail
