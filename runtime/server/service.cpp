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
    : catalogue_(make_catalogue()) {
  offer(std::move(offered), std::move(unservable));
}

void model_service::offer(std::vector<offered_model> offered,
                          std::vector<unservable_model> unservable) {
  auto before = seen();
  auto made = make_catalogue();
  made->unservable = std::move(unservable);
  for (auto& each : offered) {
    auto const old =
        std::find_if(before->models.begin(), before->models.end(), [&](auto const& one) {
          return one.is.metadata.name == each.metadata.name && one.is.version == each.version;
        });
    auto account = old != before->models.end()
                       ? old->account
                       : std::make_shared<model_account>(each.metadata.name, each.version);
    auto const place = each.place.value_or(made->models.size());
    made->models.push_back({std::move(each), place, std::move(account)});
  }
  auto left = before->left->get_future();
  before.reset();
  std::unique_lock lock{mutex_};
  catalogue_ = std::move(made);
  lock.unlock();
  left.wait();
}

std::shared_ptr<model_service::catalogue> model_service::make_catalogue() {
  std::shared_ptr<catalogue> made{new catalogue, [](catalogue const* last) {
                                    auto const left = last->left;
                                    delete last;
                                    left->set_value();
                                  }};
  made->left = std::make_shared<std::promise<void>>();
  return made;
}

model_service::shared_catalogue model_service::seen() const {
  std::lock_guard const lock{mutex_};
  return catalogue_;
}

void model_service::attach(model_executor& host, std::string endpoint, std::string scheme) {
  endpoint_ = std::move(endpoint);
  scheme_ = std::move(scheme);
  host_ = &host;
}

readiness model_service::ready() const {
  return ready(*seen());
}

readiness model_service::ready(catalogue const& offered) const {
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
  auto faults = engines_ == nullptr ? std::vector<std::string>{} : engines_->faults();
  for (auto const& each : offered.models) {
    if (auto const why = host->unservable(each.place)) {
      faults.push_back(cannot_be_served(each.is.metadata.name, *why));
    }
  }
  for (auto const& each : offered.unservable) {
    if (each.is_wanted) {
      faults.push_back(cannot_be_served(each.name, each.reason));
    }
  }
  return faults.empty() ? readiness{}
                        : readiness{false, fmt::format("{}", fmt::join(faults, "; "))};
}

std::vector<unservable_model> model_service::unservable() const {
  return seen()->unservable;
}

std::vector<std::string> model_service::models() const {
  auto names = engines_ == nullptr ? std::vector<std::string>{} : engines_->names();
  for (auto const& each : seen()->models) {
    if (std::find(names.begin(), names.end(), each.is.metadata.name) == names.end()) {
      names.push_back(each.is.metadata.name);
    }
  }
  return names;
}

std::optional<std::size_t> model_service::engine(std::string const& name) const {
  return engines_ == nullptr ? std::nullopt : engines_->place_of(name);
}

void model_service::refuse_engine(std::string const& model, error_kind kind,
                                  char const* what) const {
  if (engine(model)) {
    throw error{kind, fmt::format("'{}' is an engine, {}", model, what)};
  }
}

model_service::entry const& model_service::catalogue::find(std::string const& model,
                                                           std::string const& version) const {
  auto const is_of_it = [&](entry const& each) { return each.is.metadata.name == model; };
  auto const found =  // the newest version stands last
      std::find_if(models.rbegin(), models.rend(), [&](entry const& each) {
        return is_of_it(each) && (version.empty() || each.is.version == version);
      });
  if (found != models.rend()) {
    return *found;
  }
  for (auto const& each : unservable) {
    if (each.name == model) {
      throw error{error_kind::unavailable, cannot_be_served(model, each.reason)};
    }
  }
  throw error{error_kind::not_found,
              std::any_of(models.begin(), models.end(), is_of_it)
                  ? fmt::format("model '{}' has no version '{}'", model, version)
                  : fmt::format("there is no model '{}'; GET /v2/sluice/status names those "
                                "that are served",
                                model)};
}

void model_service::check(entry const& model) const {
  auto const* const host = host_.load();
  if (auto const why = host == nullptr ? std::nullopt : host->unservable(model.place)) {
    throw error{error_kind::unavailable, cannot_be_served(model.is.metadata.name, *why)};
  }
}

std::vector<std::string> model_service::versions(std::string const& model) const {
  if (engine(model)) {
    return {"1"};
  }
  return seen()->find(model, "").is.metadata.versions;
}

model_metadata model_service::metadata(std::string const& model, std::string const& version) const {
  if (engine(model)) {
    return engines_->metadata(model, version);
  }
  auto const offered = seen();
  auto const& found = offered->find(model, version);
  check(found);
  return found.is.metadata;
}

nlohmann::json model_service::config(std::string const& model, std::string const& version) const {
  if (engine(model)) {
    return engines_->config(model, version);
  }
  auto const offered = seen();
  auto const& found = offered->find(model, version);
  check(found);
  return found.is.config;
}

readiness model_service::model_ready(std::string const& model, std::string const& version) const {
  if (auto const which = engine(model)) {
    return engines_->ready(*which);
  }
  auto const offered = seen();
  auto const& found = offered->find(model, version);
  auto const* const host = host_.load();
  return host == nullptr ? readiness{false, starting} : host->model_ready(found.place);
}

void model_service::load(std::string const& model, nlohmann::json const& parameters) {
  refuse_engine(model, error_kind::unsupported, "which is started by its requests");
  auto* const loader = loader_.load();
  if (loader == nullptr) {
    return inference_service::load(model, parameters);
  }
  if (!parameters.empty()) {
    throw error{error_kind::unsupported,
                fmt::format("parameter '{}' of a load is not supported: a model is loaded as its "
                            "repository has it",
                            parameters.begin().key())};
  }
  loader->load(model);
}

void model_service::unload(std::string const& model) {
  refuse_engine(model, error_kind::unsupported, "which is started by its requests");
  auto* const loader = loader_.load();
  return loader == nullptr ? inference_service::unload(model) : loader->unload(model);
}

request_ticket model_service::infer(infer_request request, std::function<void(infer_result)> done) {
  auto* const host = host_.load();
  if (host == nullptr) {
    done(error{error_kind::unavailable, fmt::format("{}; try again in a moment", starting)});
    return 0;
  }
  try {
    refuse_engine(request.model, error_kind::invalid_argument,
                  "which answers at its own routes, and over HTTP alone (engine in the policy)");
    auto const offered = seen();
    auto const& wanted = offered->find(request.model, request.version);
    check(wanted);
    auto const arrival = request.arrival.value_or(std::chrono::steady_clock::now());
    auto const most = wanted.is.max_batch_size;
    check_batch(request, most);
    auto const samples = samples_in(request, most > 0);
    auto id = request.id;
    return host->submit(wanted.place, std::move(request),
                        [account = wanted.account, arrival, samples, done,
                         id = std::move(id)](infer_result result) {
                          account->on_answer(result, std::chrono::steady_clock::now() - arrival,
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
  auto const offered = seen();
  auto const uptime = std::chrono::steady_clock::now() - started_;
  auto result = host == nullptr ? describe(host_snapshot{}) : host->status();
  // As that look has it: another one might contradict it.
  auto const executor = result.find("executor");
  bool const computes = executor == result.end() || (*executor)["state"] == "ready";
  result["server"] = {{"pid", ::getpid()},
                      {"endpoint", host == nullptr ? "" : endpoint_},
                      {"scheme", scheme_},
                      {"grpc_endpoint", host == nullptr ? "" : grpc_endpoint_},
                      {"models_ready", ready(*offered).ready},
                      {"uptime_s", std::chrono::duration<double>{uptime}.count()},
                      {"state", host == nullptr ? "starting"
                                : draining_     ? "draining"
                                : !computes     ? "restarting"
                                                : "ready"}};
  if (engines_ != nullptr) {
    result["engines"] = engines_->status();
  }
  auto& faults = result["unservable"] = nlohmann::json::array();
  for (auto const& each : offered->unservable) {
    faults.push_back({{"name", each.name}, {"reason", each.reason.what()}});
  }
  return result;
}

nlohmann::json model_service::statistics(std::string const& model,
                                         std::string const& version) const {
  auto const offered = seen();
  if (!model.empty()) {
    (void)offered->find(model, version);
  }
  auto list = nlohmann::json::array();
  for (auto const& each : offered->models) {
    if ((model.empty() || each.is.metadata.name == model) &&
        (version.empty() || each.is.version == version)) {
      list.push_back(describe(each.account->statistics()));
    }
  }
  return {{"model_stats", std::move(list)}};
}

std::string model_service::metrics() const {
  std::vector<model_statistics> counted;
  for (auto const& each : seen()->models) {
    counted.push_back(each.account->statistics());
  }
  auto* const pool = pool_.load();
  return metrics_of(counted, status(), pool == nullptr ? std::nullopt : pool->look(pool_patience));
}

}  // namespace sluice::server
