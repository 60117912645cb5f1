#include "runtime/telemetry/metrics_text.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

namespace sluice::telemetry {
namespace {

TEST(metrics, are_written_by_family_with_help_and_type) {
  metrics_text metrics;
  metrics.family("b_total", metrics_text::kind::counter, "Of b.");
  metrics.sample({}, 3);
  metrics.family("a", metrics_text::kind::gauge, "Of a.");
  metrics.sample({{"x", "1"}, {"y", "2"}}, 0.25);
  metrics.sample({{"x", "2"}, {"y", "2"}}, -1);
  EXPECT_EQ(metrics.text(),
            "# HELP b_total Of b.\n# TYPE b_total counter\nb_total 3\n"
            "# HELP a Of a.\n# TYPE a gauge\na{x=\"1\",y=\"2\"} 0.25\na{x=\"2\",y=\"2\"} -1\n");
}

TEST(metrics, distributions_are_written_as_cumulative_counts) {
  metrics_text made;
  made.family("took_seconds", metrics_text::kind::histogram, "How long.");
  std::array const bounds{0.5, 1.0};
  std::array<std::uint64_t, 3> const counts{2, 0, 3};
  made.sample({{"a", "b"}}, {.bounds = bounds, .counts = counts, .sum = 7.25});
  EXPECT_EQ(made.text(),
            "# HELP took_seconds How long.\n"
            "# TYPE took_seconds histogram\n"
            "took_seconds_count{a=\"b\"} 5\n"
            "took_seconds_sum{a=\"b\"} 7.25\n"
            "took_seconds_bucket{a=\"b\",le=\"0.5\"} 2\n"
            "took_seconds_bucket{a=\"b\",le=\"1\"} 2\n"
            "took_seconds_bucket{a=\"b\",le=\"+Inf\"} 5\n");
}

TEST(metrics, families_without_samples_are_left_out) {
  metrics_text metrics;
  EXPECT_EQ(metrics.text(), "");
  metrics.family("a", metrics_text::kind::gauge, "Of a.");
  EXPECT_EQ(metrics.text(), "");
}

TEST(metrics, what_labels_cannot_have_as_it_is_is_escaped) {
  metrics_text metrics;
  metrics.family("a", metrics_text::kind::gauge, "Of a.");
  metrics.sample({{"x", "a\"b\\c\nd"}}, 1);
  EXPECT_NE(metrics.text().find(R"(a{x="a\"b\\c\nd"} 1)"), std::string::npos) << metrics.text();
}

TEST(metrics, large_counts_keep_their_digits) {
  metrics_text metrics;
  metrics.family("a_total", metrics_text::kind::counter, "Of a.");
  metrics.sample({}, 123'456'789'012.0);
  EXPECT_NE(metrics.text().find("a_total 123456789012\n"), std::string::npos) << metrics.text();
}

}  // namespace
}  // namespace sluice::telemetry
