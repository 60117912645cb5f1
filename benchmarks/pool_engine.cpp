#include "benchmarks/pool_engine.hpp"

#include <algorithm>

#include "memhandover/ledger/chunk_choice.hpp"

namespace sluice::bench {

using memhandover::demand;
using memhandover::demand_answer;
using memhandover::tenant_client;

pool_engine::pool_engine(memhandover::broker_options const& broker, std::string const& name,
                         std::shared_ptr<memhandover::cuda_driver const> driver) {
  // It is demanded from as soon as it has joined.
  std::lock_guard const lock{mutex_};
  client_ = tenant_client::join(broker, memhandover::client_kind::engine, name,
                                [this](demand const& wanted) { return park(wanted); });
  auto const& shape = client_->view().shape();
  memory_ = memhandover::open_device_memory(shape, client_->files().chunks, std::move(driver));
  base_ = memory_->reserve(shape.chunk_count);
  places_.resize(shape.chunk_count);
  needs_scrub_.resize(shape.chunk_count);
  notes_.emplace(client_->view(), client_->slot());
}

pool_engine::~pool_engine() {
  std::unique_lock lock{mutex_};
  unmap(those(place::here));
  auto const count = client_->view().shape().chunk_count;
  lock.unlock();
  client_.reset();  // its thread uses what is destroyed next
  memory_->release(base_, count);
}

std::uint64_t pool_engine::chunk_bytes() const noexcept {
  return client_->view().shape().chunk_bytes;
}

std::uint32_t pool_engine::grow(std::uint32_t count, std::chrono::steady_clock::time_point deadline,
                                std::string_view what, use const& each) {
  client_->ask(count, memhandover::lifetime::lasting, deadline);
  std::lock_guard const lock{mutex_};
  collect();
  auto const come = std::move(spare_);
  spare_.clear();
  for (auto const chunk : come) {
    take_in(chunk);
  }
  notes_->say(come, what);
  for (auto const chunk : come) {
    each(at(chunk));
  }
  return static_cast<std::uint32_t>(come.size());
}

void pool_engine::shrink(std::uint32_t count) {
  std::lock_guard const lock{mutex_};
  auto given = those(place::here);
  given.resize(std::min<std::size_t>(count, given.size()));
  unmap(given);
  client_->release(given);
}

void pool_engine::visit(use const& each) {
  std::lock_guard const lock{mutex_};
  for (auto const chunk : those(place::here)) {
    each(at(chunk));
  }
}

void pool_engine::visit_lost(use const& each) {
  std::lock_guard const lock{mutex_};
  for (auto const chunk : those(place::lost)) {
    each(at(chunk));
  }
}

std::byte* pool_engine::at(std::uint32_t chunk) const noexcept {
  return base_ + chunk * chunk_bytes();
}

/// Gives what is demanded: what has been granted and is not used yet, then what is mapped, as neighbours if possible.
demand_answer pool_engine::park(demand const& wanted) {
  demand_answer answer;
  answer.noticed_ns = wanted.awake_ns;
  std::lock_guard const lock{mutex_};
  answer.closed_ns = memhandover::monotonic_ns();  // nobody uses a chunk any more
  collect();
  auto own = those(place::here);
  own.insert(own.end(), spare_.begin(), spare_.end());
  std::sort(own.begin(), own.end());
  std::vector<bool> free(places_.size());
  for (std::uint32_t i = 0; i < free.size(); ++i) {
    free[i] = client_->view().chunk(i).is_free();
  }
  answer.chunks = memhandover::choose_chunks_to_give(own, free, wanted.chunks);
  unmap(answer.chunks);
  std::erase_if(spare_, [&](std::uint32_t chunk) {
    return std::binary_search(answer.chunks.begin(), answer.chunks.end(), chunk);
  });
  parked_ += answer.chunks.empty() ? 0 : 1;
  answer.idle_ns = memhandover::monotonic_ns();
  return answer;
}

void pool_engine::collect() {
  chunks dirty;
  auto const granted = client_->collect(&dirty);
  spare_.insert(spare_.end(), granted.begin(), granted.end());
  for (auto const chunk : dirty) {
    needs_scrub_.at(chunk) = true;
  }
}

void pool_engine::take_in(std::uint32_t chunk) {
  memory_->map(at(chunk), {&chunk, 1});
  if (needs_scrub_.at(chunk)) {
    memory_->scrub(at(chunk), {&chunk, 1});
    needs_scrub_[chunk] = false;
  }
  places_.at(chunk) = place::here;
  ++held_;
}

/// Those of `gone` that are mapped.
void pool_engine::unmap(std::span<std::uint32_t const> gone) {
  for (auto const chunk : gone) {
    if (places_.at(chunk) == place::here) {
      memory_->unmap(at(chunk), 1);
      places_[chunk] = place::lost;
      --held_;
    }
  }
}

pool_engine::chunks pool_engine::those(place where) const {
  chunks found;
  for (std::uint32_t i = 0; i < places_.size(); ++i) {
    if (places_[i] == where) {
      found.push_back(i);
    }
  }
  return found;
}

}  // namespace sluice::bench
