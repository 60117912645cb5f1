/// What is asked of a device, and whether that has moved so far that all of its models are to be predicted anew.
///
/// A prediction together (shared_executors.hpp) costs more with every model, and so does a decision for each of them; most of what
/// one model does changes little for the others. So all are predicted anew when the mean wait in the line of all has moved by a
/// tenth, and by a hundredth of a service. In between a model decides by its own news, with what the others asked for when all were
/// predicted.
///
///   device_demands asked{now};
///   asked.add(now, 20ms);  // a request was computed, whosever it was
///   if (asked.has_moved(now, models)) {
///     asked.predict(now, demands, {.at_once = 1});  // of all models, then decide for each of them
///   }
///   controller.tick(now, asked.beside(7));
///
/// Pure. One thread at a time.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "scheduler/estimators.hpp"
#include "scheduler/shared_executors.hpp"

namespace sluice::scheduler {

class device_demands {
 public:
  explicit device_demands(instant start);

  void add(instant now, seconds service);
  /// Since all were predicted; or there are others than then.
  [[nodiscard]] bool has_moved(instant now, std::size_t models) const noexcept;
  /// Throws as `predict_together`, and changes nothing then.
  void predict(instant now, std::span<shared_model const> models,
               shared_executors const& executors);
  /// The same where it was computed elsewhere.
  void predicted(instant now, shared_executors const& executors, std::vector<shared_load> beside);
  /// Alone for a model that was not among those.
  [[nodiscard]] shared_load const& beside(std::size_t place) const noexcept;

 private:
  [[nodiscard]] double mean_wait_s(instant now) const noexcept;
  [[nodiscard]] double mean_service_s() const noexcept {
    return count_ > 0.0 ? sum_s_ / count_ : 0.0;
  }

  decayed_rate rate_;
  instant last_;
  double count_ = 0.0, sum_s_ = 0.0, square_s2_ = 0.0;  ///< of services, decayed
  double executors_ = 1.0;
  double wait_s_ = 0.0;  ///< when all were predicted
  std::vector<shared_load> beside_;
  shared_load alone_{};
};

}  // namespace sluice::scheduler
