/// What a server wants of its executor, and the models that are made of that.
/// A session has it prepare models for a host that is made, and change those of one that serves.
///
/// One thread at a time.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "runtime/server/executor/executor_session.hpp"
#include "runtime/server/hosting/model_host.hpp"
#include "runtime/server/server_setup.hpp"
#include "runtime/torch/model/torch_model.hpp"

namespace sluice::server {

/// One place of a server's list.
struct ordered_model {
  std::string name, version;
  std::string stamp;  ///< of its files; another one stands for others
  bool is_retired = false;

  bool operator==(ordered_model const&) const = default;
};

/// What a server wants of its executor.
struct settings {
  std::filesystem::path policy_file, model_repository;
  std::string endpoint, runtime_dir;
  std::filesystem::path experience;  ///< file of what is known of models (experience_file.hpp)
  int threads = 1;
  std::vector<ordered_model> models;
  std::vector<std::string> unservable;  ///< of what else the policy names: each with its reason
};

/// Throws `invalid_argument` if it lacks something.
[[nodiscard]] settings settings_in(nlohmann::json const& from);

/// A model that the server offers, and why not if it cannot be served.
struct offered_entry {
  ordered_model order;
  chosen_model is;
  std::optional<error> fault{};
  bool is_named = false;  ///< by the policy
};

/// Makes models of what a server wants, and remembers what it has made.
class model_list {
 public:
  model_list(memhandover::pool_shape const& shape, torch_device device,
             std::shared_ptr<host_board> board)
      : shape_(shape), device_(device), board_(std::move(board)) {}

  /// One that cannot be served stands in no other's way. Throws if all cannot, with these and all others' reasons. Empty if
  /// `session` says that the end is wanted.
  [[nodiscard]] std::vector<served_model> prepare(executor_orders const& orders,
                                                  executor_session const& session);

  /// Has `host` serve what is wanted now.
  void change(model_host& host, executor_orders const& orders);

  /// As a session tells it.
  [[nodiscard]] nlohmann::json unservable() const;

 private:
  [[nodiscard]] served_model model_for(std::size_t place, offered_entry const& of,
                                       policy::policy const& wanted);

  /// What it is promised, without the model.
  [[nodiscard]] served_model terms_of(std::size_t place, offered_entry const& of,
                                      policy::policy const& wanted) const;

  [[nodiscard]] error all_faults(settings const& given) const;

  memhandover::pool_shape shape_;
  torch_device device_;
  std::shared_ptr<host_board> board_;
  std::vector<ordered_model> models_;
  std::vector<policy::model_policy>
      promises_;  ///< by place, as the last policy that names them has them
  std::map<std::size_t, error> faults_;
};

}  // namespace sluice::server
