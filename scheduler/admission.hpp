/// Whether a request can be answered in time, by what surely comes before it.
///
/// Requests of one line are computed one after the other. Before a new one come those of its line that wait, as long as their
/// own time lasts, and what is left of the one that is being computed, whether somebody waits for that or not. How long each
/// takes is learned from the times between answers: the mean of the last ones, of which the few that stand out count no more
/// than others, for models that are warm; the shortest of the last cold starts for a model that is not. What is not known
/// takes no time. A request is refused if the sum, and what it may vary by, goes beyond its deadline: where all take equally
/// long none is that could have been met; where they do not, one that is taken is in time with 95 in 100, since of those who
/// come faster than they can be answered it is better to answer fewer in time than all too late. One that nobody is before is
/// never refused: what it takes is learned from it.
///
///   admission front{models, admission::lines::one_for_each_model};
///   auto const verdict = front.ask(0, now, deadline, host);
///   if (verdict.admitted) {
///     front.add(0, ticket, now, deadline, host);
///   }
///   // … its answer has come …
///   front.on_answer(0, ticket, now);
///
/// Pure: the caller has the clock, and says what is seen of who computes. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// What the last computations have taken.
class recent_times {
 public:
  /// So many count.
  static constexpr std::size_t remembered = 64;
  /// So many must have been seen.
  static constexpr std::size_t enough = 4;

  struct estimate {
    double mean = 0.0;  ///< seconds, as all of these
    double variance = 0.0;
    double doubt = 0.0;  ///< standard deviation of the mean
    double least = 0.0;
  };

  /// As often as `times` says.
  void add(seconds took, std::size_t times = 1);
  [[nodiscard]] std::optional<estimate> const& known() const noexcept { return known_; }

 private:
  void forget_if_changed();

  std::deque<double> times_;
  std::optional<estimate> known_;
};

class admission {
 public:
  using ticket = std::uint64_t;
  enum class lines {
    one_for_each_model,  ///< models compute beside each other
    one_for_all          ///< one thread computes for all
  };
  struct verdict {
    bool admitted = true;
    /// Until it would be answered, with what that may vary by; 0 where nobody is before it, or what it takes is not known.
    seconds predicted{0.0};
    /// When one with as much time would be taken, if nobody else came.
    seconds retry_after{0.0};
  };
  /// What is seen now of who computes.
  struct sight {
    std::function<bool(std::size_t model)> is_warm;
    /// Nothing: it is not being computed.
    std::function<std::optional<instant>(ticket which)> computed_since;
  };

  /// Standard deviations that are kept between the predicted end and the deadline.
  static constexpr double margin = 2.0;
  /// No more are counted.
  static constexpr std::size_t most_counted = 4096;

  admission(std::size_t models, lines how);

  [[nodiscard]] verdict ask(std::size_t model, instant now, instant deadline, sight const& host);
  /// It waits from now on. Tickets grow.
  void add(std::size_t model, ticket which, instant now, instant deadline, sight const& host);
  /// Nobody waits for it any more, and it is not computed if it has not been begun.
  void cancel(std::size_t model, ticket which);
  /// Its answer has come; one that is not known is passed over. `together` is the number of requests that were computed
  /// with it in one go, each of which has taken its part of that; 0: another one of them has said so already.
  void on_answer(std::size_t model, ticket which, instant now, std::size_t together = 1);
  /// It waits no longer, and has not been answered: it failed, or its time is over. What is being computed goes on.
  void remove(std::size_t model, ticket which, instant now, sight const& host);
  /// All who wait are computed anew.
  void restart(instant now);
  /// There are more models from now on.
  void extend(std::size_t models);
  /// Another model has its place from now on; nobody waits for the one before.
  void forget(std::size_t model);

 private:
  struct waiting {
    std::size_t model = 0;
    instant since, deadline;
    bool is_cold = false;  ///< it is to find its model cold
    bool is_cancelled = false;
  };
  /// Is computed, although nobody waits for it.
  struct unheard {
    ticket which = 0;
    std::size_t model = 0;
    instant began, seen;
    bool is_cold = false;
  };
  struct pending {
    std::map<ticket, waiting> requests;
    std::optional<unheard> before;        ///< all of them
    instant free_since = instant::min();  ///< the first of them has not been begun before
    bool is_unsure = false;               ///< what the next answer takes teaches nothing
  };
  struct times {
    recent_times warm, cold;
  };

  [[nodiscard]] pending& pending_of(std::size_t model) {
    return queues_.at(lines_ == lines::one_for_all ? 0 : model);
  }
  [[nodiscard]] pending const& pending_of(std::size_t model) const {
    return queues_.at(lines_ == lines::one_for_all ? 0 : model);
  }
  /// What is to be done before a request that comes last: mean and variance. Nothing: nobody is before it.
  struct work {
    double mean = 0.0, variance = 0.0, doubt = 0.0;
  };
  [[nodiscard]] std::optional<work> before(std::size_t model, instant now, sight const& host) const;
  [[nodiscard]] work of_warm(std::size_t model) const;
  static void pass(work& takes, instant since, instant now);
  [[nodiscard]] recent_times& times_of(std::size_t model, bool is_cold);
  /// Takes note of the end of what nobody waits for.
  void look(pending& line, instant now, sight const& host);

  lines lines_;
  std::vector<pending> queues_;
  std::vector<times> times_;
};

}  // namespace sluice::scheduler
