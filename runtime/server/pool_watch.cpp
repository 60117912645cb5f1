#include "runtime/server/pool_watch.hpp"

#include <spdlog/spdlog.h>

#include <utility>

#include "runtime/server/inference/caught_error.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;

bool has_server(json const& pool, std::string const& endpoint) {
  for (auto const& client : pool.value("clients", json::array())) {
    if (client.value("kind", "") == "server" && client.value("endpoint", "") == endpoint) {
      return true;
    }
  }
  return false;
}

std::string id_of(json const& pool) {
  return pool.value("pool", json::object()).value("id", "");
}

}  // namespace

std::optional<json> pool_watch::look(std::chrono::milliseconds patience) {
  std::unique_lock lock{mutex_};
  auto const before = answers_;
  if (!std::exchange(asking_, true)) {
    thread_.post([this] { ask(); });
  }
  return changed_.wait_for(lock, patience, [&] { return answers_ != before; }) ? seen_
                                                                               : std::nullopt;
}

void pool_watch::ask() {
  std::optional<json> seen;
  try {
    seen = own_pool(ask_());
  } catch (...) {  // who looks leaves out what is not known
    spdlog::debug("the pool could not be asked after reason={}",
                  telemetry::quoted(caught_error().what()));
  }
  std::lock_guard const lock{mutex_};
  seen_ = std::move(seen);
  asking_ = false;
  ++answers_;
  changed_.notify_all();
}

std::optional<json> pool_watch::own_pool(json answer) {
  auto const several = answer.find("pools");
  auto pools = several == answer.end() ? json::array({std::move(answer)}) : std::move(*several);
  for (auto& pool : pools) {
    if (has_server(pool, endpoint_)) {
      last_id_ = id_of(pool);
      return std::move(pool);
    }
  }
  for (auto& pool : pools) {
    if (!last_id_.empty() && id_of(pool) == last_id_) {
      return std::move(pool);
    }
  }
  return std::nullopt;
}

}  // namespace sluice::server
