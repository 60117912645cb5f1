/// Requests that wait for an answer of another process, by their tickets, which grow, and by their deadlines. Not
/// thread-safe.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/server/executor/parcel.hpp"
#include "runtime/server/inference/model_executor.hpp"

namespace sluice::server::detail {

struct pending_request {
  std::size_t model = 0;
  parcel request;  ///< for the next process, should this one end
  std::string id;
  model_executor::completion done;
  std::chrono::steady_clock::time_point arrival, deadline;
  bool is_cancelled = false;  ///< its client has left; the process has been told
};

/// Of one model.
struct request_counts {
  std::uint64_t requests = 0, failed = 0, cancelled = 0;
  std::uint64_t refused = 0;  ///< of those that failed, because they would have been late
  std::size_t waiting = 0;
};

class pending_requests {
 public:
  using time_point = std::chrono::steady_clock::time_point;

  /// `gone` is told of each that does not wait any more.
  explicit pending_requests(std::size_t models,
                            std::function<void(std::size_t model, request_ticket which)> gone = {})
      : gone_(std::move(gone)), counts_(models) {}

  void add(request_ticket ticket, pending_request request);
  /// Null if there is none, or no longer.
  [[nodiscard]] pending_request* find(request_ticket ticket);
  [[nodiscard]] std::optional<pending_request> take(request_ticket ticket);
  /// All whose deadline has passed.
  [[nodiscard]] std::vector<std::pair<request_ticket, pending_request>> take_late(time_point now);
  [[nodiscard]] std::vector<pending_request> take_all_of(std::size_t model);
  [[nodiscard]] std::vector<pending_request> take_all();
  /// Those of the model are computed one by one if they are sent again.
  void separate(std::size_t model);
  /// In the order in which they came.
  [[nodiscard]] std::vector<request_ticket> tickets() const;
  [[nodiscard]] std::optional<time_point> next_deadline() const;
  /// The oldest one.
  [[nodiscard]] std::optional<request_ticket> first() const;
  [[nodiscard]] bool empty() const noexcept { return requests_.empty(); }

  /// There are more models from now on.
  void extend(std::size_t models) { counts_.resize(std::max(models, counts_.size())); }
  /// Another model has its place from now on.
  void forget(std::size_t model) { counts_.at(model) = {}; }

  /// Counts an answer; `failure` is null for a result.
  void on_answer(std::size_t model, error const* failure);
  /// Counts one that is refused without having waited, as it would have been late or for another reason.
  void on_refusal(std::size_t model, bool would_be_late = false);
  [[nodiscard]] request_counts const& counts(std::size_t model) const { return counts_.at(model); }
  /// Of all models.
  [[nodiscard]] request_counts total() const;

 private:
  [[nodiscard]] pending_request remove(std::map<request_ticket, pending_request>::iterator which);

  std::function<void(std::size_t, request_ticket)> gone_;
  std::map<request_ticket, pending_request> requests_;
  std::set<std::pair<time_point, request_ticket>> deadlines_;
  std::vector<request_counts> counts_;
};

}  // namespace sluice::server::detail
