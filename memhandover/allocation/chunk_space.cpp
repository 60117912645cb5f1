#include "memhandover/allocation/chunk_space.hpp"

#include <algorithm>
#include <utility>

namespace sluice::memhandover {

chunk_space::chunk_space(device_memory& memory, std::uint32_t capacity, std::size_t alignment,
                         backing behind, std::uint32_t unbacked)
    : memory_(memory),
      capacity_(capacity),
      reserved_(capacity + unbacked),
      behind_(behind),
      home_(memory.reserve(reserved_)),
      base_(home_),
      ranges_(alignment) {}

chunk_space::~chunk_space() {
  if (closed_ || parked_ > 0) {
    for_each_run(which::all, [this](std::size_t first, std::uint32_t count) {
      memory_.unmap(base_ + first * memory_.shape().chunk_bytes, count);
    });
  } else {
    memory_.unmap(base_,
                  std::max({static_cast<std::uint32_t>(chunks_.size()),
                            static_cast<std::uint32_t>(left_mapped_.size()), private_pages_}));
  }
  memory_.release(home_, reserved_);
}

void chunk_space::record_in(chunk_history& history, std::string_view name,
                            std::uint64_t generation) {
  history_ = &history;
  name_ = name;
  generation_ = generation;
  history.record_reserved(base_, reserved_, generation, name);
}

void chunk_space::record_event(chunk_event kind, std::span<std::uint32_t const> chunks,
                               std::byte const* at) const noexcept {
  if (history_ != nullptr) {
    history_->record(kind, chunks, at, generation_, name_);
  }
}

std::byte* chunk_space::allocate(std::size_t bytes) {
  if (closed_ || bytes > reserved_ * memory_.shape().chunk_bytes) {
    return nullptr;
  }
  auto const offset = ranges_.allocate(bytes);
  return offset ? base_ + *offset : nullptr;
}

std::byte* chunk_space::allocate_unbacked(std::size_t bytes) {
  auto const chunk = memory_.shape().chunk_bytes;
  if (!unbacked()) {
    auto const beyond = reserved_ - static_cast<std::uint32_t>(ranges_.capacity() / chunk);
    ranges_.grow(beyond * chunk);
    beyond_ = beyond;
  }
  return allocate(bytes);
}

std::size_t chunk_space::free(std::byte* address) noexcept {
  return ranges_.free(static_cast<std::size_t>(address - base_));
}

bool chunk_space::contains(void const* address) const noexcept {
  auto const* at = static_cast<std::byte const*>(address);
  return at >= base_ && at < base_ + reserved_ * memory_.shape().chunk_bytes;
}

std::uint32_t chunk_space::chunks_needed(std::size_t bytes) const {
  auto const chunk = memory_.shape().chunk_bytes;
  if (bytes > capacity_ * chunk) {
    return capacity_ + 1;
  }
  return static_cast<std::uint32_t>((ranges_.shortage(bytes) + chunk - 1) / chunk);
}

void chunk_space::grow(std::span<std::uint32_t const> chunks) {
  auto const chunk = memory_.shape().chunk_bytes;
  auto* at = base_ + chunks_.size() * chunk;
  chunks_.reserve(chunks_.size() + chunks.size());
  ranges_.grow(chunks.size() * chunk);
  try {
    if (behind_ == backing::process) {
      memory_.map_private(at, static_cast<std::uint32_t>(chunks.size()));
    } else {
      memory_.map(at, chunks);
    }
  } catch (...) {
    ranges_.shrink(chunks.size() * chunk);
    throw;
  }
  chunks_.insert(chunks_.end(), chunks.begin(), chunks.end());
  record_event(chunk_event::mapped, chunks, at);
}

std::uint32_t chunk_space::idle_chunks() const {
  if (parked_ > 0) {
    return 0;
  }
  auto const free = static_cast<std::uint32_t>(ranges_.free_at_end() / memory_.shape().chunk_bytes);
  return std::max(free, beyond_) - beyond_;
}

std::vector<std::uint32_t> chunk_space::shrink(std::uint32_t count, unmapping how) {
  auto const taken = std::min(count, idle_chunks());
  auto const keep = chunks_.size() - taken;
  auto const chunk = memory_.shape().chunk_bytes;
  std::vector<std::uint32_t> released(chunks_.begin() + static_cast<std::ptrdiff_t>(keep),
                                      chunks_.end());
  if (how == unmapping::soon) {
    memory_.unmap_soon(base_ + keep * chunk, released);
  } else {
    memory_.unmap(base_ + keep * chunk, taken);
  }
  record_event(chunk_event::unmapped, released, base_ + keep * chunk);
  chunks_.resize(keep);
  if (taken > 0) {
    ranges_.shrink((std::exchange(beyond_, 0) + taken) * chunk);
  }
  return released;
}

bool chunk_space::is_unused(std::size_t position) const {
  auto const chunk = memory_.shape().chunk_bytes;
  auto const around = ranges_.free_around(position * chunk);
  return around && around->first + around->second >= (position + 1) * chunk;
}

/// Calls `each(position, count)` for every run of mapped chunks that are wanted; it may end their mapping.
template <typename Each>
void chunk_space::for_each_run(which wanted, Each const& each) const {
  auto const is_wanted = [&](std::size_t at) {
    return at < chunks_.size() && chunks_[at] < parked_chunk &&
           (wanted == which::all || is_unused(at));
  };
  for (std::size_t at = 0; at < chunks_.size(); ++at) {
    auto const first = at;
    while (is_wanted(at)) {
      ++at;
    }
    if (at > first) {
      each(first, static_cast<std::uint32_t>(at - first));
    }
  }
}

chunk_space::unused_memory chunk_space::unused() const {
  unused_memory found;
  for_each_run(which::unused,
               [&](std::size_t /*first*/, std::uint32_t count) { found.chunks += count; });
  found.other_bytes =
      (mapped_chunks() - found.chunks) * memory_.shape().chunk_bytes - ranges_.used();
  return found;
}

std::vector<std::uint32_t> chunk_space::close() {
  std::vector<std::uint32_t> released;
  released.reserve(unused().chunks);
  closed_ = true;
  for_each_run(which::unused, [&](std::size_t first, std::uint32_t count) {
    auto const going = std::span{chunks_}.subspan(first, count);
    auto* const at = base_ + first * memory_.shape().chunk_bytes;
    memory_.unmap(at, count);
    record_event(chunk_event::unmapped, going, at);
    released.insert(released.end(), going.begin(), going.end());
    std::fill(going.begin(), going.end(), no_chunk);
    gaps_ += count;
  });
  return released;
}

void chunk_space::move_to(std::byte* where) {
  auto* const to = where == nullptr ? home_ : where;
  memory_.map(to, chunks_);
  memory_.unmap(base_, static_cast<std::uint32_t>(chunks_.size()));
  record_event(chunk_event::unmapped, chunks_, base_);
  base_ = to;
  record_event(chunk_event::mapped, chunks_, base_);
}

std::vector<std::uint32_t> chunk_space::positions(bool in_use) const {
  std::vector<std::uint32_t> found;
  for (std::uint32_t position = 0; position < chunks_.size(); ++position) {
    if (chunks_[position] < parked_chunk && is_in_use(position) == in_use) {
      found.push_back(position);
    }
  }
  return found;
}

void chunk_space::park(std::uint32_t first, std::span<std::uint32_t> chunks) noexcept {
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    chunks[i] = std::exchange(chunks_[first + i], parked_chunk);
  }
  auto const count = static_cast<std::uint32_t>(chunks.size());
  parked_ += count;
  if (!holds_private_pages()) {
    memory_.unmap(at(first), count);
  }
  record_event(chunk_event::unmapped, chunks, at(first));
}

void chunk_space::unpark(std::uint32_t first, std::span<std::uint32_t const> chunks) {
  if (!holds_private_pages()) {
    memory_.map(at(first), chunks);
  }
  std::copy(chunks.begin(), chunks.end(), chunks_.begin() + first);
  parked_ -= static_cast<std::uint32_t>(chunks.size());
  record_event(chunk_event::mapped, chunks, at(first));
}

void chunk_space::revoke(bool unmap_now) {
  if (!unmap_now) {
    revoked_ = true;
    left_mapped_ = std::exchange(chunks_, {});
    return;
  }
  memory_.revoke(base_, chunks_);
  revoked_ = true;
  private_pages_ = memory_.shape().backend == backend_kind::host
                       ? static_cast<std::uint32_t>(chunks_.size())
                       : 0;
  record_event(chunk_event::revoked, chunks_, base_);
  chunks_.clear();
}

void chunk_space::finish_revoke() noexcept {
  memory_.unmap(base_, static_cast<std::uint32_t>(left_mapped_.size()));
  record_event(chunk_event::revoked, left_mapped_, base_);
  left_mapped_.clear();
}

}  // namespace sluice::memhandover
