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
/// What is offered may be exchanged while requests come: each is checked against, and goes to, one list.
///
/// Thread-safe. Versions of one model are offered oldest first; a request without a version gets
/// the last of them. As Triton with its strict readiness it is ready while all models that the policy names can be
/// served.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/server/engines/engine_host.hpp"
#include "runtime/server/inference/inference_service.hpp"
#include "runtime/server/inference/model_executor.hpp"
#include "runtime/server/model_account.hpp"
#include "runtime/server/pool_watch.hpp"

namespace sluice::server {

/// One version of one model.
struct offered_model {
  model_metadata metadata;
  std::string version;
  std::int64_t max_batch_size = 0;  ///< 0: its tensors have no batch dimension
  nlohmann::json config{};          ///< as the repository has it
  std::optional<std::size_t> place =
      std::nullopt;  ///< of the host's; nothing: as it stands in the list
};

/// Who has models of the repository come and go.
class model_loader {
 public:
  virtual ~model_loader() = default;

  /// See inference_service.hpp.
  virtual void load(std::string const& model) = 0;
  virtual void unload(std::string const& model) = 0;
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
  /// What is listed beside models; to be called before anybody asks. It must outlive the last question.
  void set_engines(engine_host& engines) { engines_ = &engines; }
  /// As `engine_host::change`, where there are engines.
  void change_engines(std::vector<policy::model_policy> const& wanted) {
    if (engines_ != nullptr) engines_->change(wanted);
  }

  /// Offers these from now on, and returns when nobody looks at the others any more. What is known of a version that stays, stays.
  void offer(std::vector<offered_model> offered, std::vector<unservable_model> unservable);
  /// Who is asked to load and to unload; null: nobody. As `host`.
  void attach(model_loader& loader) { loader_ = &loader; }

  [[nodiscard]] readiness ready() const override;
  [[nodiscard]] std::vector<unservable_model> unservable() const override;
  [[nodiscard]] std::vector<std::string> models() const override;
  [[nodiscard]] std::vector<std::string> versions(std::string const& model) const override;
  [[nodiscard]] model_metadata metadata(std::string const& model,
                                        std::string const& version) const override;
  [[nodiscard]] readiness model_ready(std::string const& model,
                                      std::string const& version) const override;
  [[nodiscard]] nlohmann::json config(std::string const& model,
                                      std::string const& version) const override;
  void load(std::string const& model, nlohmann::json const& parameters) override;
  void unload(std::string const& model) override;
  request_ticket infer(infer_request request, std::function<void(infer_result)> done) override;
  void cancel(request_ticket which) override;
  [[nodiscard]] nlohmann::json status() const override;
  [[nodiscard]] nlohmann::json statistics(std::string const& model,
                                          std::string const& version) const override;
  [[nodiscard]] std::string metrics() const override;

 private:
  struct entry {
    offered_model is;
    std::size_t place = 0;
    std::shared_ptr<model_account> account;
  };
  struct catalogue {
    std::vector<entry> models;
    std::vector<unservable_model> unservable;
    std::shared_ptr<std::promise<void>> left;  ///< when the last who looks at it has

    [[nodiscard]] entry const& find(std::string const& model, std::string const& version) const;
  };
  using shared_catalogue = std::shared_ptr<catalogue const>;

  /// Nothing: no engine is called so.
  [[nodiscard]] std::optional<std::size_t> engine(std::string const& name) const;
  /// Throws for an engine: `what` cannot be done with it.
  void refuse_engine(std::string const& model, error_kind kind, char const* what) const;

  [[nodiscard]] static std::shared_ptr<catalogue> make_catalogue();
  [[nodiscard]] shared_catalogue seen() const;
  /// Throws `unavailable` if the host cannot serve it.
  void check(entry const& model) const;
  [[nodiscard]] readiness ready(catalogue const& offered) const;

  mutable std::mutex mutex_;
  shared_catalogue catalogue_;  ///< guarded by it
  std::chrono::steady_clock::time_point const started_ = std::chrono::steady_clock::now();
  std::string endpoint_, scheme_ = "http";       ///< set before `host_`
  std::string grpc_endpoint_;                    ///< the same; empty: there is none
  engine_host* engines_ = nullptr;               ///< set before anybody asks
  std::atomic<model_executor*> host_ = nullptr;  ///< null while starting
  std::atomic<pool_watch*> pool_ = nullptr;      ///< null: not known
  std::atomic<model_loader*> loader_ = nullptr;
  std::atomic<bool> draining_ = false;
};

}  // namespace sluice::server
