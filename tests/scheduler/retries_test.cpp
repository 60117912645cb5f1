#include "scheduler/retries.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "scheduler/model_controller.hpp"

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;

instant at(double s) {
  return instant{seconds{s}};
}

TEST(retries, are_known_by_what_the_client_calls_them_and_once_for_each_refusal) {
  retries again;
  auto const order = retries::mark_of("order-17");
  EXPECT_FALSE(again.take(order, at(0.0)));
  again.on_refusal(order, at(0.0), 2s);
  EXPECT_FALSE(again.take(retries::mark_of("order-18"), at(2.0)));
  EXPECT_TRUE(again.take(order, at(2.0)));
  EXPECT_FALSE(again.take(order, at(2.1))) << "it was refused once";
}

TEST(retries, are_expected_for_twice_what_the_client_was_told_and_a_pause_of_its_own) {
  auto const order = retries::mark_of("order-17");
  auto const comes_after = [&](double wait_s) {
    retries again;
    again.on_refusal(order, at(5.0), 20s);
    return again.take(order, at(5.0 + wait_s));
  };
  EXPECT_TRUE(comes_after(20.0));
  EXPECT_TRUE(comes_after(49.9));
  EXPECT_FALSE(comes_after(50.1));
}

TEST(retries, that_have_no_name_are_new) {
  EXPECT_EQ(retries::mark_of(""), 0U);
  EXPECT_NE(retries::mark_of("0"), 0U);
  retries again;
  again.on_refusal(0, at(0.0), 2s);
  EXPECT_FALSE(again.take(0, at(1.0)));
}

TEST(retries, remember_the_newest_refusals) {
  retries again;
  for (request_mark i = 1; i <= retries::most_known + 10; ++i) {
    again.on_refusal(i, at(0.0), 1s);
  }
  EXPECT_FALSE(again.take(10, at(1.0)));
  EXPECT_TRUE(again.take(11, at(1.0)));
}

TEST(retries, do_no_harm_whatever_times_they_are_told) {
  retries again;
  again.on_refusal(1, at(0.0), seconds{std::nan("")});
  EXPECT_TRUE(again.take(1, at(1.0)));
  again.on_refusal(1, at(0.0), forever);
  EXPECT_FALSE(again.take(1, at(1e5)));
  again.on_refusal(2, at(1e300), -1s);
  EXPECT_TRUE(again.take(2, at(0.0)));
}

/// One server, first come first served, and clients that send again what was refused, as often as `tries` says.
class overload {
 public:
  struct seen {
    double arrivals_per_s = 0.0;
    double answered_per_s = 0.0;
    double in_time = 0.0;  // of those that were answered
    std::uint64_t observed = 0;
    double attainment = 0.0;
  };

  explicit overload(unsigned tries, bool has_names = true) : tries_(tries), has_names_(has_names) {}

  seen run() {
    constexpr double rate = 30.0;
    constexpr double service_s = 0.05;  // 20 a second at most
    constexpr double end_s = 900.0;
    double next_s = 0.0;
    double tick_s = 1.0;
    double rates = 0.0;
    std::uint64_t number = 0;
    unsigned answers = 0;
    unsigned within = 0;
    unsigned ticks = 0;
    model_report report;
    for (double now = 0.0; now < end_s;) {
      double const again_s = waiting_.empty() ? end_s : waiting_.front().at_s;
      now = std::min({next_s, again_s, tick_s});
      deliver(now);
      if (now == tick_s) {
        report = model_.tick(at(now));
        tick_s += 1.0;
        if (now > end_s / 2.0) {
          rates += report.slow_rate_per_s;
          ++ticks;
        }
        continue;
      }
      sent it{now, ++number, 0};
      if (now == again_s) {
        it = waiting_.front();
        std::pop_heap(waiting_.begin(), waiting_.end(), later);
        waiting_.pop_back();
      } else {
        next_s = now - std::log(uniform()) / rate;
      }
      auto const answer = model_.on_arrival(at(now), has_names_ ? it.number : 0);
      if (answer.admitted) {
        double const begin = std::max(now, free_s_);
        free_s_ = begin + service_s;
        done_.push_back({free_s_, free_s_ - now, answer.is_retry});
        if (now > end_s / 2.0) {
          ++answers;
          within += free_s_ - now <= 0.3 ? 1 : 0;
        }
      } else if (it.tries < tries_) {
        waiting_.push_back(
            {now + answer.retry_after.count() * (1.0 + 0.25 * uniform()), it.number, it.tries + 1});
        std::push_heap(waiting_.begin(), waiting_.end(), later);
      }
    }
    return {.arrivals_per_s = rates / ticks,
            .answered_per_s = answers / (end_s / 2.0),
            .in_time = static_cast<double>(within) / answers,
            .observed = report.observed_requests,
            .attainment = *report.observed_attainment};
  }

 private:
  struct sent {
    double at_s;
    std::uint64_t number;
    unsigned tries;
  };
  struct answered {
    double at_s;
    double response_s;
    bool is_retry;
  };
  static bool later(sent const& a, sent const& b) { return a.at_s > b.at_s; }
  double uniform() { return (static_cast<double>(random_()) + 0.5) / 4294967296.0; }
  void deliver(double now) {
    for (; !done_.empty() && done_.front().at_s <= now; done_.pop_front()) {
      auto const& each = done_.front();
      model_.on_service(at(each.at_s), 50ms, seconds{each.response_s}, each.is_retry);
    }
  }

  unsigned tries_;
  bool has_names_;
  std::mt19937 random_{9};
  model_controller model_{{.goal = {.percentile = 0.9, .latency = 300ms, .window = 100s},
                           .service = {.mean = 50ms, .scv = 0.1},
                           .reject_on_miss = true},
                          at(0.0)};
  std::vector<sent> waiting_;
  std::deque<answered> done_;
  double free_s_ = 0.0;
};

TEST(retries, are_no_demand_and_do_not_overload_the_server) {
  auto const once = overload{0}.run();
  auto const thrice = overload{3}.run();
  auto const nameless = overload{3, false}.run();
  EXPECT_NEAR(once.arrivals_per_s, 30.0, 1.5);
  EXPECT_NEAR(thrice.arrivals_per_s, 30.0, 1.5);
  EXPECT_GT(nameless.arrivals_per_s, 40.0) << "nobody can tell them from new ones";
  EXPECT_NEAR(thrice.answered_per_s, once.answered_per_s, 0.1 * once.answered_per_s);
  EXPECT_GT(thrice.in_time, 0.85);
  // Each request counts once, whatever its client does: some 100 s of them.
  EXPECT_NEAR(static_cast<double>(thrice.observed), 3000.0, 250.0);
  EXPECT_NEAR(static_cast<double>(once.observed), 3000.0, 250.0);
}

}  // namespace
}  // namespace sluice::scheduler
