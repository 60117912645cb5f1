#include "memhandover/ledger/host_copies.hpp"

#include <new>
#include <string>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(copy_holders <= 1U << 16U);

constexpr unsigned state_shift = 56;
constexpr unsigned holder_shift = 40;
constexpr std::uint64_t generation_mask = (1ULL << holder_shift) - 1;

std::uint64_t next(std::uint64_t generation) {
  return (generation + 1) & generation_mask;
}

void check_holder(std::uint16_t holder) {
  if (holder >= copy_holders) {
    throw error{error_kind::invalid_argument,
                "nobody is holder " + std::to_string(holder) + " of host copies"};
  }
}

[[noreturn]] void damaged(std::string const& what) {
  throw error{error_kind::internal, "the table of host copies is damaged: " + what};
}

std::uint32_t slots_of(std::uint64_t budget, std::uint64_t slot_bytes, std::string const& where) {
  auto const wanted = "host copies are to have " + format_bytes(budget) + where;
  if (slot_bytes == 0 || budget < slot_bytes) {
    throw error{error_kind::invalid_argument, wanted + ", but one takes " +
                                                  format_bytes(slot_bytes) +
                                                  ", a chunk of the pool; give them more, or none"};
  }
  if (budget / slot_bytes > max_host_copy_slots) {
    throw error{
        error_kind::invalid_argument,
        wanted + ", but can have " + format_bytes(max_host_copy_slots * slot_bytes) + " at most"};
  }
  return static_cast<std::uint32_t>(budget / slot_bytes);
}

}  // namespace

std::uint64_t copy_word::pack() const noexcept {
  return static_cast<std::uint64_t>(state) << state_shift |
         static_cast<std::uint64_t>(holder) << holder_shift | (generation & generation_mask);
}

std::optional<copy_word> copy_word::unpack(std::uint64_t word) noexcept {
  auto const state = word >> state_shift;
  auto const holder = static_cast<std::uint16_t>(word >> holder_shift & 0xffffU);
  bool const is_free = state == static_cast<std::uint64_t>(copy_state::free);
  if (state > static_cast<std::uint64_t>(copy_state::kept) || holder >= copy_holders ||
      (is_free && holder != 0)) {
    return std::nullopt;
  }
  return copy_word{static_cast<copy_state>(state), holder, word & generation_mask};
}

std::atomic<std::uint64_t>& host_copies::word(std::uint32_t slot) const {
  if (slot >= words_.size()) {
    throw error{error_kind::invalid_argument, "there is no slot " + std::to_string(slot) +
                                                  " of host copies, of which there are " +
                                                  std::to_string(words_.size())};
  }
  return words_[slot];
}

copy_word host_copies::at(std::uint32_t slot) const {
  auto const found = copy_word::unpack(word(slot).load(std::memory_order_acquire));
  if (!found) {
    damaged("the word of slot " + std::to_string(slot) +
            " says neither who has it nor that it is free");
  }
  return *found;
}

host_copies::range host_copies::range_of(std::optional<copy_place> only) const noexcept {
  auto const on_disk_from = slots() - disk_slots_;
  return {only == copy_place::disk ? on_disk_from : 0,
          only == copy_place::memory ? on_disk_from : slots()};
}

copy_counts host_copies::count(std::optional<copy_place> only) const noexcept {
  copy_counts counted;
  auto const [first, end] = range_of(only);
  for (auto const& each : words_.subspan(first, end - first)) {
    auto const found = copy_word::unpack(each.load(std::memory_order_acquire));
    auto& of_its_kind = !found                             ? counted.damaged
                        : found->state == copy_state::free ? counted.free
                        : found->state == copy_state::held ? counted.held
                                                           : counted.kept;
    ++of_its_kind;
  }
  return counted;
}

std::vector<held_copy> host_copies::hold(std::uint32_t count, std::uint16_t holder,
                                         std::optional<copy_place> only) {
  check_holder(holder);
  std::vector<held_copy> taken;
  auto const [first, end] = range_of(only);
  if (count > end - first) {
    return taken;
  }
  taken.reserve(count);
  for (auto slot = first; slot < end && taken.size() < count; ++slot) {
    auto& each = words_[slot];
    auto seen = each.load(std::memory_order_acquire);
    auto const found = copy_word::unpack(seen);
    if (!found || found->state != copy_state::free) {
      continue;
    }
    auto const generation = next(found->generation);
    if (each.compare_exchange_strong(seen, copy_word{copy_state::held, holder, generation}.pack(),
                                     std::memory_order_acq_rel)) {
      taken.push_back({slot, holder, generation});
    }
  }
  if (taken.size() < count) {
    for (auto const& each : taken) {
      give_back(each);
    }
    taken.clear();
  }
  return taken;
}

bool host_copies::change(held_copy const& mine, copy_state from, copy_state to) {
  auto seen = copy_word{from, mine.holder, mine.generation}.pack();
  auto const holder = to == copy_state::free ? std::uint16_t{0} : mine.holder;
  return word(mine.slot).compare_exchange_strong(
      seen, copy_word{to, holder, mine.generation}.pack(), std::memory_order_acq_rel);
}

bool host_copies::keep(held_copy const& mine) {
  return change(mine, copy_state::held, copy_state::kept);
}

bool host_copies::hold_again(held_copy const& mine) {
  return change(mine, copy_state::kept, copy_state::held);
}

bool host_copies::give_back(held_copy const& mine) {
  return change(mine, copy_state::held, copy_state::free) ||
         change(mine, copy_state::kept, copy_state::free);
}

std::vector<held_copy> host_copies::steal(std::uint32_t count, std::uint16_t thief,
                                          std::optional<copy_place> only) {
  check_holder(thief);
  std::vector<held_copy> taken;
  auto const [first, end] = range_of(only);
  for (auto slot = first; slot < end && taken.size() < count; ++slot) {
    auto& each = words_[slot];
    auto seen = each.load(std::memory_order_acquire);
    auto const found = copy_word::unpack(seen);
    if (!found || found->state != copy_state::kept || found->holder == thief) {
      continue;
    }
    auto const generation = next(found->generation);
    if (each.compare_exchange_strong(seen, copy_word{copy_state::held, thief, generation}.pack(),
                                     std::memory_order_acq_rel)) {
      taken.push_back({slot, thief, generation});
    }
  }
  return taken;
}

/// A thief may take a kept one meanwhile: then it is not the dead one's any more.
std::uint32_t host_copies::sweep(std::function<bool(std::uint16_t holder)> const& is_dead) {
  std::uint32_t freed = 0;
  for (auto& each : words_) {
    auto seen = each.load(std::memory_order_acquire);
    auto const found = copy_word::unpack(seen);
    if (found && found->state != copy_state::free && is_dead(found->holder) &&
        each.compare_exchange_strong(seen, copy_word{copy_state::free, 0, found->generation}.pack(),
                                     std::memory_order_acq_rel)) {
      ++freed;
    }
  }
  return freed;
}

std::size_t host_copies_table_bytes(std::uint32_t slots) noexcept {
  return sizeof(host_copies_header) + std::size_t{slots} * sizeof(std::atomic<std::uint64_t>);
}

std::uint32_t host_copy_slots(std::uint64_t budget, std::uint64_t slot_bytes) {
  return slots_of(budget, slot_bytes, "");
}

std::uint32_t disk_copy_slots(std::uint64_t disk_budget, std::uint64_t slot_bytes) {
  return disk_budget == 0 ? 0 : slots_of(disk_budget, slot_bytes, " on disk");
}

void make_host_copies(std::span<std::byte> memory, std::uint64_t budget, std::uint64_t slot_bytes,
                      std::uint64_t disk_budget) {
  auto const disk_slots = disk_copy_slots(disk_budget, slot_bytes);
  auto const slots = host_copy_slots(budget, slot_bytes) + disk_slots;
  if (memory.size() != host_copies_table_bytes(slots)) {
    damaged("it is not as long as its slots need");
  }
  auto* header = new (memory.data()) host_copies_header{};
  header->magic.store(host_copies_magic);
  header->version.store(host_copies_version);
  header->slots.store(slots);
  header->slot_bytes.store(slot_bytes);
  header->budget.store(budget);
  header->disk_slots.store(disk_slots);
  header->disk_budget.store(disk_budget);
}

host_copies_header& host_copies_header_in(std::span<std::byte> memory) {
  if (memory.size() < sizeof(host_copies_header)) {
    damaged("it is shorter than its header");
  }
  return *std::launder(reinterpret_cast<host_copies_header*>(memory.data()));
}

host_copies_shape host_copies_shape_in(std::span<std::byte> memory) {
  auto const& header = host_copies_header_in(memory);
  if (header.magic.load() != host_copies_magic) {
    damaged("it does not begin as one");
  }
  if (auto const version = header.version.load(); version != host_copies_version) {
    damaged("it has version " + std::to_string(version) + ", this program knows version " +
            std::to_string(host_copies_version));
  }
  host_copies_shape const shape{header.slots.load(), header.slot_bytes.load(),
                                header.disk_slots.load()};
  if (shape.slot_bytes == 0 || shape.slots <= shape.disk_slots ||
      shape.memory_slots() > max_host_copy_slots || shape.disk_slots > max_host_copy_slots ||
      header.budget.load() / shape.slot_bytes != shape.memory_slots() ||
      header.disk_budget.load() / shape.slot_bytes != shape.disk_slots) {
    damaged("its slots are not what its budget makes");
  }
  if (memory.size() != host_copies_table_bytes(shape.slots)) {
    damaged("it is not as long as its slots need");
  }
  return shape;
}

std::span<std::atomic<std::uint64_t>> host_copies_words(std::span<std::byte> memory,
                                                        host_copies_shape const& shape) noexcept {
  return {std::launder(reinterpret_cast<std::atomic<std::uint64_t>*>(memory.data() +
                                                                     sizeof(host_copies_header))),
          shape.slots};
}

}  // namespace sluice::memhandover
