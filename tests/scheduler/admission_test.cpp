#include "scheduler/admission.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <vector>

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;

constexpr double never = std::numeric_limits<double>::infinity();

instant at(double time) {
  return instant{seconds{time}};
}

/// Where all models are warm, and no computation goes on that nobody waits for.
admission::sight const all_warm{[](std::size_t) { return true; },
                                [](admission::ticket) { return std::optional<instant>{}; }};

admission::sight warm_if(std::function<bool(std::size_t)> is_warm) {
  return {std::move(is_warm), [](admission::ticket) { return std::optional<instant>{}; }};
}

/// Who computes, as a model host does: first come first served, whose time is over is not begun, what has begun is computed
/// to its end. What the front hears of it, `admission` is told.
class simulation {
 public:
  struct setting {
    std::size_t models = 1;
    admission::lines how = admission::lines::one_for_each_model;
    double load = 0.0;  ///< of a model's first request
    std::function<double(std::mt19937_64&)> service;
  };
  struct counts {
    std::size_t refused = 0, in_time = 0, late = 0, cancelled = 0;
    std::size_t refused_in_vain = 0;  ///< that could have been met
    double busy = 0.0;
    [[nodiscard]] double share_in_time() const {
      return static_cast<double>(in_time) / static_cast<double>(in_time + late);
    }
  };

  explicit simulation(setting of)
      : of_(std::move(of)),
        front_(of_.models, of_.how),
        servers_(of_.how == admission::lines::one_for_all ? 1 : of_.models),
        warm_(of_.models, of_.load == 0.0) {}

  /// A request that comes then; whether it was taken.
  bool come(double now, std::size_t model, double patience, double leaves_after = never) {
    run_until(now);
    auto const ticket = ++last_ticket_;
    auto const service = of_.service(random_);
    auto const deadline = now + patience;
    auto const verdict = front_.ask(model, at(now), at(deadline), host_);
    if (!verdict.admitted) {
      ++seen.refused;
      seen.refused_in_vain += could_be_met(now, model, service, deadline) ? 1 : 0;
      last_retry = verdict.retry_after.count();
      return false;
    }
    front_.add(model, ticket, at(now), at(deadline), host_);
    auto& to = server_of(model);
    to.queue.push_back({ticket, model, deadline, service, now + leaves_after});
    begin_next(to, now);
    return true;
  }

  void run_until(double end) {
    for (;;) {
      double next = never;
      for (auto const& each : servers_) {
        next = std::min(next, each.ends);
        for (auto const& waits : each.queue) {
          next = std::min({next, waits.deadline, waits.leaves});
        }
        if (each.running && each.running->is_heard) {
          next = std::min({next, each.running->deadline, each.running->leaves});
        }
      }
      if (next > end || next == never) {
        return;
      }
      for (auto& each : servers_) {
        step(each, next);
      }
    }
  }

  counts seen;
  double last_retry = 0.0;

 private:
  struct request {
    admission::ticket ticket = 0;
    std::size_t model = 0;
    double deadline = 0.0, service = 0.0, leaves = never;
    bool is_heard = true;  ///< somebody waits for it
  };
  struct server {
    std::deque<request> queue;
    std::optional<request> running;
    double ends = never, began = 0.0;
  };

  server& server_of(std::size_t model) { return servers_[servers_.size() == 1 ? 0 : model]; }

  /// Gone before its answer.
  bool goes(request& which, double now) {
    if (which.leaves <= now) {
      front_.cancel(which.model, which.ticket);
      front_.remove(which.model, which.ticket, at(now), host_);
      ++seen.cancelled;
      return true;
    }
    if (which.deadline <= now) {
      front_.remove(which.model, which.ticket, at(now), host_);
      ++seen.late;
      return true;
    }
    return false;
  }

  void step(server& its, double now) {
    if (its.running && its.ends <= now) {
      warm_[its.running->model] = true;
      if (its.running->is_heard) {
        ++seen.in_time;
        front_.on_answer(its.running->model, its.running->ticket, at(now));
      }
      its.running.reset();
      its.ends = never;
    }
    if (its.running && its.running->is_heard && goes(*its.running, now)) {
      its.running->is_heard = false;
    }
    std::erase_if(its.queue, [&](request& each) { return goes(each, now); });
    begin_next(its, now);
  }

  void begin_next(server& its, double now) {
    if (its.running || its.queue.empty()) {
      return;
    }
    its.running = its.queue.front();
    its.queue.pop_front();
    auto const takes = its.running->service + (warm_[its.running->model] ? 0.0 : of_.load);
    seen.busy += takes;
    its.began = now;
    its.ends = now + takes;
  }

  /// Had it been taken, with all that is before it and does not leave.
  bool could_be_met(double now, std::size_t model, double service, double deadline) {
    auto const& its = server_of(model);
    auto end = its.running ? its.ends : now;
    for (auto const& each : its.queue) {
      end += each.deadline > end ? each.service : 0.0;
    }
    return end + service < deadline;
  }

  setting of_;
  admission front_;
  std::vector<server> servers_;
  std::vector<bool> warm_;
  admission::sight const host_{
      [this](std::size_t model) { return warm_[model]; },
      [this](admission::ticket which) {
        auto const its = std::find_if(servers_.begin(), servers_.end(), [which](auto const& each) {
          return each.running && each.running->ticket == which;
        });
        return its == servers_.end() ? std::nullopt : std::optional{at(its->began)};
      }};
  std::mt19937_64 random_{7};
  admission::ticket last_ticket_ = 0;
};

auto constant(double service) {
  return [service](std::mt19937_64&) { return service; };
}

/// So many times what can be computed comes, at random, for `length` seconds.
simulation::counts load(simulation& of, double times, double service, double length,
                        double patience, std::size_t models = 1, double leaves_after = never) {
  std::mt19937_64 random{11};
  std::exponential_distribution<double> gap{times / service};
  std::uniform_int_distribution<std::size_t> which{0, models - 1};
  for (double now = gap(random); now < length; now += gap(random)) {
    of.come(now, which(random), patience, leaves_after);
  }
  of.run_until(length + 100.0);
  return of.seen;
}

TEST(admission, refuses_nobody_while_nothing_is_known) {
  admission front{1, admission::lines::one_for_each_model};
  for (admission::ticket each = 1; each <= 100; ++each) {
    ASSERT_TRUE(front.ask(0, at(0), at(1e-6), all_warm).admitted);
    front.add(0, each, at(0), at(1e-6), all_warm);
  }
}

/// One that is answered every `service` seconds, as long as is needed to know that.
void teach(admission& front, std::size_t model, double service) {
  for (std::size_t each = 0; each < recent_times::enough; ++each) {
    auto const now = static_cast<double>(each) * service;
    front.add(model, each + 1, at(now), at(now + 10.0), all_warm);
    front.on_answer(model, each + 1, at(now + service));
  }
}

constexpr double long_after = 1000.0;

TEST(admission, refuses_who_would_be_late_and_says_when_not) {
  admission front{1, admission::lines::one_for_each_model};
  teach(front, 0, 1.0);
  for (admission::ticket each = 11; each <= 13; ++each) {
    front.add(0, each, at(long_after), at(long_after + 10.0), all_warm);
  }
  EXPECT_TRUE(front.ask(0, at(long_after), at(long_after + 4.0), all_warm).admitted);
  auto const refused = front.ask(0, at(long_after), at(long_after + 3.5), all_warm);
  EXPECT_FALSE(refused.admitted);
  EXPECT_NEAR(refused.retry_after.count(), 0.5, 1e-9);
  EXPECT_TRUE(front.ask(0, at(long_after + 0.5), at(long_after + 4.0), all_warm).admitted)
      << "half of the first has been computed";
}

TEST(admission, takes_a_batch_for_as_many_requests_as_were_in_it) {
  admission front{1, admission::lines::one_for_each_model};
  admission::ticket last = 0;
  double now = 0.0;
  auto const add = [&] { front.add(0, ++last, at(now), at(now + 100.0), all_warm); };
  for (int round = 0; round < 20; ++round) {
    auto const first = last + 1;
    for (int i = 0; i < 10; ++i) {
      add();
    }
    now += 1.0;  // for all ten
    for (auto each = first; each <= last; ++each) {
      front.on_answer(0, each, at(now), each == first ? 10 : 0);
    }
  }
  for (int i = 0; i < 4; ++i) {
    add();
  }
  EXPECT_TRUE(front.ask(0, at(now), at(now + 0.51), all_warm).admitted);
  EXPECT_FALSE(front.ask(0, at(now), at(now + 0.49), all_warm).admitted);
}

TEST(admission, refuses_nobody_before_whom_nobody_waits) {
  admission front{1, admission::lines::one_for_each_model};
  teach(front, 0, 1.0);
  EXPECT_TRUE(front.ask(0, at(long_after), at(long_after + 0.1), all_warm).admitted);
  front.add(0, 11, at(long_after), at(long_after + 10.0), all_warm);
  EXPECT_FALSE(front.ask(0, at(long_after), at(long_after + 1.9), all_warm).admitted);
  front.remove(0, 11, at(long_after), all_warm);
  EXPECT_TRUE(front.ask(0, at(long_after), at(long_after + 0.1), all_warm).admitted);
}

TEST(admission, does_not_count_whose_clients_have_left_nor_whose_time_will_be_over) {
  admission front{1, admission::lines::one_for_each_model};
  teach(front, 0, 1.0);
  front.add(0, 11, at(long_after), at(long_after + 9.0), all_warm);
  for (admission::ticket each = 12; each <= 14; ++each) {
    front.add(0, each, at(long_after), at(long_after + 9.0), all_warm);
    front.cancel(0, each);
  }
  EXPECT_TRUE(front.ask(0, at(long_after), at(long_after + 2.0), all_warm).admitted);
  for (admission::ticket each = 15; each <= 18; ++each) {
    front.add(0, each, at(long_after), at(long_after + 0.5), all_warm);
  }
  EXPECT_TRUE(front.ask(0, at(long_after), at(long_after + 2.0), all_warm).admitted);
  EXPECT_FALSE(front.ask(0, at(long_after), at(long_after + 1.9), all_warm).admitted);
}

TEST(admission, counts_other_models_only_where_one_thread_computes_for_all) {
  admission beside{2, admission::lines::one_for_each_model},
      together{2, admission::lines::one_for_all};
  for (auto* const front : {&beside, &together}) {
    teach(*front, 0, 1.0);
    teach(*front, 1, 1.0);
    front->add(0, 11, at(long_after), at(long_after + 9.0), all_warm);
    front->add(0, 12, at(long_after), at(long_after + 9.0), all_warm);
  }
  auto const ask = [](admission& front, admission::sight const& is_warm) {
    return front.ask(1, at(long_after), at(long_after + 2.5), is_warm).admitted;
  };
  EXPECT_TRUE(ask(beside, all_warm));
  EXPECT_FALSE(ask(together, all_warm));
  EXPECT_TRUE(ask(together, warm_if([](std::size_t model) { return model == 1; })))
      << "who has to be loaded may come later";
}

TEST(admission, knows_cold_starts_from_others) {
  admission front{1, admission::lines::one_for_each_model};
  auto const cold = warm_if([](std::size_t) { return false; });
  teach(front, 0, 1.0);
  double now = long_after;
  for (admission::ticket each = 11; each < 11 + recent_times::enough; ++each, now += 10.0) {
    front.add(0, each, at(now), at(now + 10.0), cold);
    front.on_answer(0, each, at(now + 5.0));
  }
  front.add(0, 31, at(now), at(now + 20.0), cold);
  EXPECT_TRUE(front.ask(0, at(now), at(now + 6.0), cold).admitted);
  EXPECT_FALSE(front.ask(0, at(now), at(now + 5.9), cold).admitted);
  EXPECT_TRUE(front.ask(0, at(now), at(now + 2.0), all_warm).admitted) << "it is warm by now";
}

TEST(admission, counts_what_is_computed_although_nobody_waits_for_it_and_learns_from_it) {
  admission front{1, admission::lines::one_for_each_model};
  teach(front, 0, 1.0);
  admission::sight const computes_11{[](std::size_t) { return true; },
                                     [](admission::ticket which) {
                                       return which == 11 ? std::optional{at(long_after)}
                                                          : std::nullopt;
                                     }};
  front.add(0, 11, at(long_after), at(long_after + 0.4), computes_11);
  front.cancel(0, 11);
  front.remove(0, 11, at(long_after + 0.4), computes_11);
  auto const ask = [&](double now, double patience, admission::sight const& host) {
    return front.ask(0, at(now), at(now + patience), host).admitted;
  };
  EXPECT_FALSE(ask(long_after + 0.4, 1.5, computes_11));
  EXPECT_TRUE(ask(long_after + 0.4, 1.7, computes_11));
  EXPECT_FALSE(ask(long_after + 3.0, 0.9, computes_11)) << "it takes longer than others did";
  EXPECT_TRUE(ask(long_after + 3.1, 0.9, all_warm)) << "it has ended";
  front.add(0, 12, at(long_after + 4.0), at(long_after + 9.0), all_warm);
  EXPECT_FALSE(ask(long_after + 4.0, 2.2, all_warm)) << "computations take longer";
}

TEST(admission, is_not_misled_by_one_computation_that_stood_out) {
  recent_times times;
  for (std::size_t each = 0; each < recent_times::remembered; ++each) {
    times.add(seconds{each == 20 ? 30.0 : 0.01});
  }
  EXPECT_LT(times.known()->mean, 0.011);
  EXPECT_LT(std::sqrt(times.known()->variance), 0.005);
}

TEST(admission, begins_anew_what_another_process_computes) {
  admission front{1, admission::lines::one_for_each_model};
  teach(front, 0, 1.0);
  front.add(0, 11, at(long_after), at(long_after + 9.0), all_warm);
  EXPECT_TRUE(front.ask(0, at(long_after + 0.9), at(long_after + 2.0), all_warm).admitted);
  front.restart(at(long_after + 0.9));
  EXPECT_FALSE(front.ask(0, at(long_after + 0.9), at(long_after + 2.0), all_warm).admitted);
}

struct regime {
  double service, patience, times;
};

class constant_times : public testing::TestWithParam<regime> {};

TEST_P(constant_times, refuse_nobody_who_could_have_been_met_and_answer_all_others_in_time) {
  auto const& is = GetParam();
  for (auto const how : {admission::lines::one_for_each_model, admission::lines::one_for_all}) {
    std::size_t const models = how == admission::lines::one_for_all ? 3 : 1;
    simulation of{{.models = models, .how = how, .service = constant(is.service)}};
    for (std::size_t model = 0; model < models; ++model) {  // what is known
      for (std::size_t i = 0; i < recent_times::enough; ++i) {
        of.come(-1000.0 + static_cast<double>(model * 100 + i) * 2 * is.service, model, never);
      }
    }
    of.seen = {};
    auto const seen = load(of, is.times, is.service, 3000 * is.service, is.patience, models);
    EXPECT_EQ(seen.refused_in_vain, 0U);
    EXPECT_EQ(seen.late, 0U);
    if (is.times > 1.0) {
      EXPECT_GT(seen.refused, 0U);
      EXPECT_GT(seen.busy, 0.95 * 3000 * is.service) << "it would have had time for more";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(loads, constant_times,
                         testing::Values(regime{0.01, 0.1, 3.0}, regime{0.01, 1.0, 3.0},
                                         regime{1.0, 2.5, 3.0}, regime{0.01, 0.025, 3.0},
                                         regime{0.01, 0.1, 0.7}, regime{0.01, 0.1, 1.1},
                                         regime{0.05, 0.7, 20.0}));

/// Without what is known at first, and with times that differ.
TEST(admission, answers_in_time_whom_it_takes_at_three_times_the_capacity) {
  std::vector<std::function<double(std::mt19937_64&)>> const services{
      constant(0.01),
      [](std::mt19937_64& random) {
        return std::uniform_real_distribution<double>{0.007, 0.013}(random);
      },
      [](std::mt19937_64& random) {
        return std::gamma_distribution<double>{4.0, 0.0025}(random);
      },
      [](std::mt19937_64& random) { return std::exponential_distribution<double>{100.0}(random); }};
  for (std::size_t which = 0; which < services.size(); ++which) {
    for (auto const patience : {0.1, 0.3, 1.0}) {
      simulation of{{.service = services[which]}};
      auto const seen = load(of, 3.0, 0.01, 100.0, patience);
      EXPECT_GE(seen.share_in_time(), 0.95) << which << ' ' << patience;
      EXPECT_GT(seen.busy, 95.0) << which << ' ' << patience;
      EXPECT_GT(seen.in_time, which == 3 ? 8'000U : 9'000U) << which << ' ' << patience;
    }
  }
}

TEST(admission, answers_in_time_whom_it_takes_although_others_leave) {
  simulation of{{.service = constant(0.01)}};
  auto const seen = load(of, 3.0, 0.01, 100.0, 0.2, 1, 0.1);
  EXPECT_GE(seen.share_in_time(), 0.95);
  EXPECT_EQ(seen.refused_in_vain, 0U);
}

TEST(admission, answers_in_time_whom_it_takes_of_a_model_that_is_cold_first) {
  simulation of{{.load = 0.5, .service = constant(0.01)}};
  auto const seen = load(of, 3.0, 0.01, 100.0, 0.2);
  EXPECT_GE(seen.share_in_time(), 0.95);
  EXPECT_EQ(seen.refused_in_vain, 0U);
}

TEST(admission, goes_on_after_computations_have_become_slower_or_faster) {
  double service = 0.01;
  simulation of{{.service = [&service](std::mt19937_64&) { return service; }}};
  (void)load(of, 3.0, 0.01, 10.0, 0.1);
  for (auto const next : {0.3, 0.01}) {
    service = next;
    double const learned = 5.0, end = 65.0;
    for (double now = 0.0; now < end; now += 0.005) {
      of.come(1000.0 / next + now, 0, 0.503);
      of.seen = now < learned ? simulation::counts{} : of.seen;
    }
    of.run_until(1000.0 / next + 100.0);
    EXPECT_GE(of.seen.share_in_time(), 0.95) << next;
    EXPECT_GT(of.seen.busy, 0.95 * (end - learned)) << next;
  }
}

TEST(admission, another_model_has_a_place_where_nothing_is_known) {
  for (auto const how : {admission::lines::one_for_each_model, admission::lines::one_for_all}) {
    admission front{1, how};
    front.extend(2);
    admission::ticket ticket = 0;
    auto const learn = [&](std::size_t model) {
      for (std::size_t i = 0; i < recent_times::enough; ++i) {
        auto const begin = 10.0 * static_cast<double>(++ticket);
        front.add(model, ticket, at(begin), at(begin + 9.0), all_warm);
        front.on_answer(model, ticket, at(begin + 1.0));
      }
    };
    auto const admits =
        [&](std::size_t model) {  // one that comes behind another, and has too little time
          auto const now = 10.0 * static_cast<double>(++ticket);
          front.add(model, ticket, at(now), at(now + 9.0), all_warm);
          bool const admitted = front.ask(model, at(now), at(now + 1.5), all_warm).admitted;
          front.on_answer(model, ticket, at(now + 1.0));
          return admitted;
        };
    learn(1);
    EXPECT_FALSE(admits(1));
    front.forget(1);
    EXPECT_TRUE(admits(1));
  }
}

}  // namespace
}  // namespace sluice::scheduler
