/// Training's launches are held while the server wants that and training's share allows it.
///
///   open ──want──► held ──its limit──► spent ──training has had its share──► held
///    ▲              │                    │
///    └───release─────┴───────release───────┘       want leads to spent at once if nothing is left
///
/// While spent, requests go on beside training, which the device then divides between them.
///
///   compute_pause pause{pool, 0.05};
///   pause.want();     // a request has come
///   pause.attend();   // … at pause.next_event(), again and again …
///   pause.release();   // none is left
///   pause.release_at(soon);   // or: none is left, and none comes before
///
/// A pause's limit stands in shared memory from its beginning, so how long launches are held does not
/// depend on when `attend` is called.
///
/// Thread-safety: none; the owner serialises calls.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "memhandover/client/serving_pool.hpp"
#include "runtime/server/hosting/pause_counts.hpp"
#include "scheduler/pause_budget.hpp"

namespace sluice::server::detail {

class compute_pause {
 public:
  using clock = std::chrono::steady_clock;

  /// Throws `invalid_argument` unless `min_share` is in [0, 1].
  compute_pause(std::shared_ptr<memhandover::serving_pool> pool, double min_share,
                std::function<clock::time_point()> now = clock::now);

  /// Launches are to be held from now on. Throws what claiming them throws; then nothing is wanted.
  void want();
  void release();
  /// Not before that instant, unless it is wanted again. If it is not held, at once.
  void release_at(clock::time_point end);
  /// Ends a pause that has reached its limit, and begins the next one when it may.
  void attend();

  [[nodiscard]] bool wanted() const noexcept { return state_ != state::open; }
  /// When `attend` will have something to do; `time_point::max()` if never. That a pause is to be released is none:
  /// that happens by itself.
  [[nodiscard]] clock::time_point next_event() const;
  [[nodiscard]] pause_counts counts() const;

 private:
  enum class state { open, held, spent };

  void hold(clock::time_point now);
  void end_on_time(clock::time_point now);
  void enter(state next, clock::time_point now);

  std::shared_ptr<memhandover::serving_pool> pool_;
  double min_share_;
  std::function<clock::time_point()> now_;
  scheduler::pause_budget budget_;
  std::optional<memhandover::compute_claim> claim_;
  state state_ = state::open;
  clock::time_point since_;                           ///< of `state_`
  clock::time_point limit_;                           ///< of the pause that is held
  clock::time_point end_ = clock::time_point::max();  ///< when it is to be released
  clock::duration held_{}, withheld_{};               ///< without what lasts still
  std::uint64_t pauses_ = 0, cut_short_ = 0;
};

}  // namespace sluice::server::detail
