#include "memhandover/broker/detail/pool_set.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "memhandover/broker/conversation.hpp"
#include "memhandover/broker/detail/roster.hpp"

namespace sluice::memhandover::detail {
namespace {

bool any_backend(std::string const& name) {
  return name.empty() || name == "auto";
}

/// Whether one pool may turn out to be what both wish for.
bool same_pool(pool_wish const& one, pool_wish const& other) {
  return one.device == other.device &&
         (any_backend(one.backend) || any_backend(other.backend) || one.backend == other.backend);
}

std::vector<std::uint64_t> ids_of(std::vector<roster_entry> const& pools) {
  std::vector<std::uint64_t> ids;
  ids.reserve(pools.size());
  for (auto const& pool : pools) {
    ids.push_back(pool.pool_id);
  }
  return ids;
}

/// Nobody says that such users have ended.
constexpr std::chrono::milliseconds until_next_look{500};

std::optional<int> device_of(nlohmann::json const& body) {
  return body.contains("device") ? std::optional{field(body, "device", 0)} : std::nullopt;
}

}  // namespace

pool_set::pool_set(options how)
    : options_(std::move(how)),
      earlier_(pools_in_use(options_.runtime_dir)),
      order_(ids_of(earlier_)),
      awaited_(order_),
      adopt_until_(clock::now() + options_.adoption_grace),
      copies_({.budget = options_.host_copy_bytes,
               .disk = options_.host_copy_disk,
               .lives = [this](auto pool_id, auto slot) { return may_live(pool_id, slot); }}) {
  if (awaited_.empty()) {
    pool_creation first{options_.wish};
    while (!first.done()) {
      first.advance();
    }
    adopt(first.take());
  }
}

void pool_set::adopt(pool_files files) {
  auto pool = std::make_unique<kept_pool>(std::move(files), copies_, options_.server_grace,
                                          [this] { write_roster(); });
  auto const shape = pool->view().shape();
  if (find(to_string(shape.backend), shape.device) != nullptr) {
    throw error{error_kind::not_found, "the broker keeps another pool of " + name_of(shape) +
                                           " than the one that this client belongs to"};
  }
  bool const is_new = std::find(order_.begin(), order_.end(), pool->id()) == order_.end();
  if (is_new) {
    copies_.make_for(shape, host_pool_bytes());
  }
  copies_.pool_came(pool->id(), shape);
  std::erase(awaited_, pool->id());
  pools_.push_back({std::move(pool), clock::now()});
  // Pools of an earlier broker come in any order; new ones stand behind them.
  auto place = [this](member const& each) {
    return std::find(order_.begin(), order_.end(), each.pool->id()) - order_.begin();
  };
  std::stable_sort(pools_.begin(), pools_.end(),
                   [&](member const& a, member const& b) { return place(a) < place(b); });
  write_roster();
  copies_.tidy();
}

/// Users of an earlier broker's pools may still come, however late.
bool pool_set::may_live(std::uint64_t pool_id, std::uint32_t slot) const {
  if (auto const* const pool = find(pool_id)) {
    return pool->has_client(slot);
  }
  return std::any_of(earlier_.begin(), earlier_.end(), [pool_id](auto const& pool) {
    return pool.pool_id == pool_id && is_in_use(pool);
  });
}

void pool_set::write_roster() const {
  std::vector<roster_entry> roster;
  roster.reserve(pools_.size());
  for (auto const& each : pools_) {
    roster.push_back({each.pool->id(), each.pool->users()});
  }
  detail::write_roster(options_.runtime_dir, roster);
}

bool pool_set::idle() const {
  return resolved() && attempts_.empty() &&
         std::none_of(pools_.begin(), pools_.end(),
                      [](member const& each) { return each.pool->in_use(); });
}

std::uint64_t pool_set::untouched_host_bytes() const {
  auto bytes = copies_.untouched_bytes();
  for (auto const& each : pools_) {
    bytes += each.pool->untouched_host_bytes();
  }
  return bytes;
}

std::uint64_t pool_set::host_pool_bytes() const {
  std::uint64_t bytes = 0;
  for (auto const& each : pools_) {
    auto const shape = each.pool->view().shape();
    bytes += shape.backend == backend_kind::host ? shape.bytes() : 0;
  }
  return bytes;
}

nlohmann::json pool_set::list() const {
  auto list = nlohmann::json::array();
  for (auto const& each : pools_) {
    auto const shape = each.pool->view().shape();
    list.push_back({{"pool_id", each.pool->id()},
                    {"backend", to_string(shape.backend)},
                    {"device", shape.device}});
  }
  return list;
}

kept_pool* pool_set::find(std::uint64_t pool_id) const {
  auto const found = std::find_if(pools_.begin(), pools_.end(), [pool_id](member const& each) {
    return each.pool->id() == pool_id;
  });
  return found == pools_.end() ? nullptr : found->pool.get();
}

kept_pool* pool_set::find(std::string const& backend, std::optional<int> device) const {
  for (auto const& each : pools_) {
    auto const shape = each.pool->view().shape();
    if ((any_backend(backend) || backend == to_string(shape.backend)) &&
        (!device || *device == shape.device)) {
      return each.pool.get();
    }
  }
  return nullptr;
}

kept_pool& pool_set::asked_about(nlohmann::json const& body) const {
  auto* const pool = body.contains("pool_id") ? find(field(body, "pool_id", std::uint64_t{0}))
                                              : find("", std::nullopt);
  if (pool == nullptr) {
    throw error{error_kind::not_found, "the broker keeps no such pool"};
  }
  return *pool;
}

pool_wish pool_set::wish_of(nlohmann::json const& body) const {
  auto wish = options_.wish;
  if (auto const backend = field(body, "backend", std::string{}); !any_backend(backend)) {
    wish.backend = backend;
  }
  wish.device = device_of(body).value_or(wish.device);
  if (auto const bytes = field(body, "pool_bytes", std::uint64_t{0}); bytes > 0) {
    wish.pool_bytes = bytes;
  }
  if (auto const bytes = field(body, "chunk_bytes", std::uint64_t{0}); bytes > 0) {
    wish.chunk_bytes = bytes;
  }
  return wish;
}

kept_pool* pool_set::find_or_begin(nlohmann::json const& body) {
  auto const backend = field(body, "backend", std::string{});
  auto const device = device_of(body);
  if (auto* const there = find(backend, device)) {
    return there;
  }
  auto const wish = wish_of(body);
  auto const under_way = std::find_if(attempts_.begin(), attempts_.end(), [&](auto const& each) {
    return same_pool(each->wish, wish);
  });
  auto const& made = under_way == attempts_.end() ? begin(wish) : **under_way;
  if (made.failed) {
    auto text = "there can be no pool of device " + std::to_string(wish.device) + ": " +
                made.failed->what();
    auto* const first = find("", std::nullopt);
    std::string const other = first != nullptr ? to_string(first->view().shape().backend) : "";
    if (!other.empty() && !any_backend(wish.backend) && wish.backend != other) {
      text += "; the first pool in " + options_.runtime_dir + " has the backend " + other +
              ", not " + wish.backend;
    }
    throw error{made.failed->kind(), text};
  }
  return find(backend, device);
}

pool_set::attempt& pool_set::begin(pool_wish const& wish) {
  auto& made = *attempts_.emplace_back(std::make_unique<attempt>());
  made.wish = wish;
  try {
    made.creation.emplace(wish, untouched_host_bytes());
    if (made.creation->done()) {
      adopt(made.creation->take());
    }
  } catch (error const& why) {
    made.failed = why;
  }
  return made;
}

void pool_set::advance(attempt& each) {
  try {
    each.creation->advance();
    if (each.creation->done()) {
      adopt(each.creation->take());
    }
  } catch (error const& why) {
    each.failed = why;
  }
}

void pool_set::watch(poll_list& polled) {
  for (auto const& each : attempts_) {
    each->polled_at = polled.add(each->creation->socket());
  }
  for (auto const& each : pools_) {
    each.pool->watch(polled);
  }
}

void pool_set::serve(poll_list const& polled) {
  for (auto const& each : pools_) {
    each.pool->serve(polled);
  }
  for (auto const& each : attempts_) {
    if (polled.ready(each->polled_at)) {
      advance(*each);
    }
  }
  if (copies_.awaits_pools() && clock::now() >= tidy_at_) {
    copies_.tidy();
    tidy_at_ = clock::now() + until_next_look;
  }
  if (!awaited_.empty() && clock::now() >= adopt_until_) {
    spdlog::warn("nobody came back to pools of an earlier broker pools={}", awaited_.size());
    awaited_.clear();
  }
}

void pool_set::forget_attempts() {
  std::erase_if(attempts_, [](auto const& each) { return each->failed || each->creation->done(); });
}

void pool_set::give_idle_back(std::function<bool(kept_pool const&)> const& kept) {
  auto const now = clock::now();
  for (auto each = pools_.begin(); each != pools_.end() && pools_.size() > 1;) {
    if (each->pool->in_use() || kept(*each->pool)) {
      each->needed_at = now;
    } else if (now - each->needed_at >= options_.idle) {
      spdlog::info("nobody needs the pool of {} any more; it is given back",
                   name_of(each->pool->view().shape()));
      copies_.pool_went(each->pool->id());
      each = pools_.erase(each);
      continue;
    }
    ++each;
  }
}

std::optional<pool_set::clock::time_point> pool_set::wake_at() const {
  std::optional<clock::time_point> wake;
  auto at = [&wake](clock::time_point when) { wake = wake ? std::min(*wake, when) : when; };
  if (!resolved()) {
    at(adopt_until_);
  }
  if (copies_.awaits_pools()) {
    at(tidy_at_);
  }
  for (auto const& each : pools_) {
    if (auto const when = each.pool->wake_at()) {
      at(*when);
    }
    if (pools_.size() > 1 && !each.pool->in_use()) {
      at(each.needed_at + options_.idle);
    }
  }
  return wake;
}

}  // namespace sluice::memhandover::detail
