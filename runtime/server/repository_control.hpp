/// Has the models of a server that runs come and go: all that its policy names, when that is read again (`reload`), or one by
/// one (`load`, `unload`). What stays is not disturbed, and nobody's request is refused because of a change.
///
///   repository_control control{started, text, wanted, choice};
///   model_service service{offered(choice.served), choice.unservable};
///   remote_executor executor{{.program = program, .first = control.orders()}};
///   control.attach(executor, service);
///   control.reload()["added"];   // ["encoder"]
///
/// A version has a place, in the executor and here. One whose files have changed gets another place, and leaves its own when
/// what it has been asked is answered; so does one that is served no more. A place is used again when nobody waits there.
///
/// Thread-safe: changes are made one after the other.
#pragma once

#include <filesystem>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/policy/policy.hpp"
#include "runtime/server/executor/remote_executor.hpp"
#include "runtime/server/server_setup.hpp"
#include "runtime/server/service.hpp"

namespace sluice::server {

class repository_control final : public model_loader {
 public:
  /// How the server was started.
  struct start {
    std::filesystem::path policy_file;
    /// What the command line makes of a policy's text; throws `policy_error`.
    std::function<policy::policy(std::string const& text)> parse;
    nlohmann::json settings;  ///< for executors, but for what models there are
  };

  repository_control(start how, std::string text, policy::policy wanted, model_choice choice);

  /// As things are now.
  [[nodiscard]] remote_executor::orders orders() const;

  /// Both must outlive the last change.
  void attach(remote_executor& executor, model_service& service);

  /// Reads policy and repository again. Returns {"added", "removed", "changed": [names], "unservable": [{"name", "reason"}]}.
  /// Throws what is wrong with the policy, `unsupported` for keys that a server is started with, `not_found` for models that the
  /// repository lacks: nothing has changed then.
  nlohmann::json reload();

  /// Of one model that the policy names. One that is served as the repository has it stays as it is. Throws why it cannot be
  /// served: what was served of it before, is.
  void load(std::string const& model) override;
  /// Until it is loaded again, or the policy is.
  void unload(std::string const& model) override;

 private:
  /// One version that is served, or was and may not have left yet.
  struct place {
    chosen_model is;
    std::string stamp;  ///< of its files
    bool is_retired = false;
  };
  struct state {
    std::string text{};
    policy::policy wanted{};
    std::vector<place> places{};
    std::vector<std::size_t> order{};  ///< of the places that are served, as they are offered
    std::vector<unservable_model> unservable{};
    std::set<std::string> unloaded{};
  };

  void refuse_other_engines(policy::policy const& wanted) const;
  [[nodiscard]] state now_without(std::string const& model) const;
  void put(state& next, chosen_model const& version) const;
  bool keep(state& next, policy::model_policy const& model) const;
  [[nodiscard]] bool stands(std::size_t at, chosen_model const& version,
                            std::string const& stamp) const;
  /// Has the executor, the service and this object go over to it. Throws `unavailable` if the server ends meanwhile.
  void go_over_to(state next);
  void carry_out(state const& next);
  [[nodiscard]] static bool is_foretold(chosen_model const& model);
  [[nodiscard]] remote_executor::orders orders_of(state const& of) const;
  [[nodiscard]] static std::vector<offered_model> offered_of(state const& of);
  [[nodiscard]] std::vector<unservable_model> unservable_of(state const& of) const;
  [[nodiscard]] std::vector<unservable_model> faults(std::vector<std::string> const& models) const;

  start const how_;
  mutable std::mutex mutex_;  ///< guards what follows
  state now_;
  remote_executor* executor_ = nullptr;
  model_service* service_ = nullptr;
};

}  // namespace sluice::server
