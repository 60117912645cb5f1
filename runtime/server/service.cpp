#include "runtime/server/service.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/hosting/host_status.hpp"
#include "runtime/server/metrics.hpp"

namespace sluice::server {
namespace {

constexpr auto const* starting = "the server is starting";
constexpr std::chrono::milliseconds pool_patience{1000};

std::uint64_t samples_in(infer_request const& request, bool is_batched) {
  if (!is_batched || request.inputs.empty() || request.inputs.front().shape.empty()) {
    return 1;
  }
  return static_cast<std::uint64_t>(
      std::max(request.inputs.front().shape.front(), std::int64_t{0}));
}

std::string cannot_be_served(std::string const& model, error const& reason) {
  return fmt::format("model '{}' cannot be served: {}", model, reason.what());
}

/// Triton's rule for models with a batch dimension: it is the first of all inputs, one size in a request.
void check_batch(infer_request const& request, std::int64_t most) {
  if (most == 0) {
    return;
  }
  tensor const* first = nullptr;
  for (auto const& each : request.inputs) {
    if (each.shape.empty()) {
      continue;  // which no shape of the model fits
    }
    auto const size = each.shape.front();
    if (size > most) {
      throw error{error_kind::invalid_argument,
                  fmt::format("input '{}' has {} rows, but model '{}' takes at most {} in one "
                              "request (max_batch_size); send them in several",
                              each.name, size, request.model, most)};
    }
    first = first == nullptr ? &each : first;
    if (size != first->shape.front()) {
      throw error{error_kind::invalid_argument,
                  fmt::format("input '{}' has {} rows and input '{}' has {}; the first dimension "
                              "of all inputs of model '{}' is its batch, and must be equal",
                              first->name, first->shape.front(), each.name, size, request.model)};
    }
  }
}

}  // namespace

model_service::model_service(std::vector<offered_model> offered,
                             std::vector<unservable_model> unservable)
    : offered_(std::move(offered)), unservable_(std::move(unservable)) {
  for (auto const& each : offered_) {
    accounts_.emplace_back(each.metadata.name, each.version);
  }
}

void model_service::attach(model_executor& host, std::string endpoint, std::string scheme) {
  endpoint_ = std::move(endpoint);
  scheme_ = std::move(scheme);
  host_ = &host;
}

readiness model_service::ready() const {
  auto const* const host = host_.load();
  if (host == nullptr) {
    return {false, starting};
  }
  if (draining_) {
    return {false, "the server is shutting down"};
  }
  if (auto now = host->ready(); !now) {
    return now;
  }
  std::vector<std::string> faults;
  for (std::size_t i = 0; i < offered_.size(); ++i) {
    if (auto const why = host->unservable(i)) {
      faults.push_back(cannot_be_served(offered_[i].metadata.name, *why));
    }
  }
  for (auto const& each : unservable_) {
    if (each.is_wanted) {
      faults.push_back(cannot_be_served(each.name, each.reason));
    }
  }
  return faults.empty() ? readiness{}
                        : readiness{false, fmt::format("{}", fmt::join(faults, "; "))};
}

std::vector<std::string> model_service::models() const {
  std::vector<std::string> names;
  for (auto const& each : offered_) {
    if (std::find(names.begin(), names.end(), each.metadata.name) == names.end()) {
      names.push_back(each.metadata.name);
    }
  }
  return names;
}

std::size_t model_service::index_of(std::string const& model, std::string const& version) const {
  bool known = false;
  for (auto index = offered_.size(); index-- > 0;) {  // the newest version stands last
    auto const& each = offered_[index];
    if (each.metadata.name == model) {
      known = true;
      if (version.empty() || each.version == version) {
        return index;
      }
    }
  }
  for (auto const& each : unservable_) {
    if (each.name == model) {
      throw error{error_kind::unavailable, cannot_be_served(model, each.reason)};
    }
  }
  throw error{error_kind::not_found,
              known ? fmt::format("model '{}' has no version '{}'", model, version)
                    : fmt::format("there is no model '{}'; GET /v2/sluice/status names those "
                                  "that are served",
                                  model)};
}

std::size_t model_service::servable(std::string const& model, std::string const& version) const {
  auto const index = index_of(model, version);
  auto const* const host = host_.load();
  if (auto const why = host == nullptr ? std::nullopt : host->unservable(index)) {
    throw error{error_kind::unavailable, cannot_be_served(model, *why)};
  }
  return index;
}

std::vector<std::string> model_service::versions(std::string const& model) const {
  return offered_[index_of(model, "")].metadata.versions;
}

model_metadata model_service::metadata(std::string const& model, std::string const& version) const {
  return offered_[servable(model, version)].metadata;
}

readiness model_service::model_ready(std::string const& model, std::string const& version) const {
  auto const index = index_of(model, version);
  auto const* const host = host_.load();
  return host == nullptr ? readiness{false, starting} : host->model_ready(index);
}

request_ticket model_service::infer(infer_request request, std::function<void(infer_result)> done) {
  auto* const host = host_.load();
  if (host == nullptr) {
    done(error{error_kind::unavailable, fmt::format("{}; try again in a moment", starting)});
    return 0;
  }
  try {
    auto const index = servable(request.model, request.version);
    auto const arrival = request.arrival.value_or(std::chrono::steady_clock::now());
    auto const most = offered_[index].max_batch_size;
    check_batch(request, most);
    auto const samples = samples_in(request, most > 0);
    auto id = request.id;
    return host->submit(index, std::move(request),
                        [&account = accounts_[index], arrival, samples, done,
                         id = std::move(id)](infer_result result) {
                          account.on_answer(result, std::chrono::steady_clock::now() - arrival,
                                            samples, id);
                          done(std::move(result));
                        });
  } catch (error const& failure) {
    done(failure);
    return 0;
  }
}

void model_service::cancel(request_ticket which) {
  if (auto* const host = host_.load(); host != nullptr) {
    host->cancel(which);
  }
}

nlohmann::json model_service::status() const {
  auto* const host = host_.load();
  auto const uptime = std::chrono::steady_clock::now() - started_;
  nlohmann::json result{{"server",
                         {{"pid", ::getpid()},
                          {"endpoint", host == nullptr ? "" : endpoint_},
                          {"scheme", scheme_},
                          {"grpc_endpoint", host == nullptr ? "" : grpc_endpoint_},
                          {"models_ready", ready().ready},
                          {"uptime_s", std::chrono::duration<double>{uptime}.count()},
                          {"state", host == nullptr  ? "starting"
                                    : draining_      ? "draining"
                                    : !host->ready() ? "restarting"
                                                     : "ready"}}}};
  result.update(host == nullptr ? describe(host_snapshot{}) : host->status());
  auto& faults = result["unservable"] = nlohmann::json::array();
  for (auto const& each : unservable_) {
    faults.push_back({{"name", each.name}, {"reason", each.reason.what()}});
  }
  return result;
}

nlohmann::json model_service::statistics(std::string const& model,
                                         std::string const& version) const {
  if (!model.empty()) {
    (void)index_of(model, version);
  }
  auto list = nlohmann::json::array();
  for (std::size_t index = 0; index < offered_.size(); ++index) {
    auto const& each = offered_[index];
    if ((model.empty() || each.metadata.name == model) &&
        (version.empty() || each.version == version)) {
      list.push_back(describe(accounts_[index].statistics()));
    }
  }
  return {{"model_stats", std::move(list)}};
}

std::string model_service::metrics() const {
  std::vector<model_statistics> seen;
  seen.reserve(accounts_.size());
  for (auto const& each : accounts_) {
    seen.push_back(each.statistics());
  }
  auto* const pool = pool_.load();
  return metrics_of(seen, status(), pool == nullptr ? std::nullopt : pool->look(pool_patience));
}

}  // namespace sluice::server
