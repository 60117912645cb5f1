/// The models of a server as its HTTP endpoint sees them: what is offered, and the way to the host
/// that runs it.
///
/// States:  starting ──attach──► ready ──drain──► draining
///
/// The endpoint needs a service before models are prepared, because a port that is taken should end
/// the start early: until a host is attached, what is offered can be asked about, and requests are
/// refused as `unavailable`.
///
///   model_service service{offered};
///   endpoint http{options, service};
///   service.attach(host, http.address());
///
/// Thread-safe. Versions of one model are offered oldest first; a request without a version gets
/// the last of them. As Triton with its strict readiness it is ready while all models that the policy names can be
/// served.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/server/inference/inference_service.hpp"
#include "runtime/server/inference/model_executor.hpp"
#include "runtime/server/model_account.hpp"
#include "runtime/server/pool_watch.hpp"

namespace sluice::server {

/// One version of one model; the host's list is in the same order.
struct offered_model {
  model_metadata metadata;
  std::string version;
  std::int64_t max_batch_size = 0;  ///< 0: its tensors have no batch dimension
};

class model_service final : public inference_service {
 public:
  /// `unservable` is what is not offered, though the repository has it.
  explicit model_service(std::vector<offered_model> offered,
                         std::vector<unservable_model> unservable = {});

  /// From now on the metrics show the pool, too. `pool` must outlive the last call of the service.
  void attach(pool_watch& pool) { pool_ = &pool; }
  /// `host` must outlive the last call of the service, which must outlive the last answer of `host`.
  void attach(model_executor& host, std::string endpoint, std::string scheme = "http");
  /// For the status; to be called before a host is attached.
  void set_grpc_endpoint(std::string address) { grpc_endpoint_ = std::move(address); }
  void drain() noexcept { draining_ = true; }

  [[nodiscard]] readiness ready() const override;
  [[nodiscard]] std::vector<unservable_model> unservable() const override { return unservable_; }
  [[nodiscard]] std::vector<std::string> models() const override;
  [[nodiscard]] std::vector<std::string> versions(std::string const& model) const override;
  [[nodiscard]] model_metadata metadata(std::string const& model,
                                        std::string const& version) const override;
  [[nodiscard]] readiness model_ready(std::string const& model,
                                      std::string const& version) const override;
  request_ticket infer(infer_request request, std::function<void(infer_result)> done) override;
  void cancel(request_ticket which) override;
  [[nodiscard]] nlohmann::json status() const override;
  [[nodiscard]] nlohmann::json statistics(std::string const& model,
                                          std::string const& version) const override;
  [[nodiscard]] std::string metrics() const override;

 private:
  [[nodiscard]] std::size_t index_of(std::string const& model, std::string const& version) const;
  /// The same, but throws `unavailable` for one that the host cannot serve.
  [[nodiscard]] std::size_t servable(std::string const& model, std::string const& version) const;

  std::vector<offered_model> const offered_;
  std::vector<unservable_model> const unservable_;
  std::deque<model_account> accounts_;  ///< of each
  std::chrono::steady_clock::time_point const started_ = std::chrono::steady_clock::now();
  std::string endpoint_, scheme_ = "http";       ///< set before `host_`
  std::string grpc_endpoint_;                    ///< the same; empty: there is none
  std::atomic<model_executor*> host_ = nullptr;  ///< null while starting
  std::atomic<pool_watch*> pool_ = nullptr;      ///< null: not known
  std::atomic<bool> draining_ = false;
};

}  // namespace sluice::server
