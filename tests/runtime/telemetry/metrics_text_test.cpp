#include "runtime/telemetry/metrics_text.hpp"

#include <gtest/gtest.h>

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
