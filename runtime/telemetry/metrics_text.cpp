#include "runtime/telemetry/metrics_text.hpp"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <iterator>
#include <limits>

namespace sluice::telemetry {

struct metrics_text::families {
  std::vector<prometheus::MetricFamily> list;
};

metrics_text::metrics_text() : families_(std::make_unique<families>()) {}
metrics_text::~metrics_text() = default;

void metrics_text::family(std::string name, kind what, std::string help) {
  auto const type = what == kind::counter ? prometheus::MetricType::Counter
                    : what == kind::gauge ? prometheus::MetricType::Gauge
                                          : prometheus::MetricType::Histogram;
  families_->list.push_back({std::move(name), std::move(help), type, {}});
}

namespace {

prometheus::ClientMetric labelled(metrics_text::label_list const& labels) {
  prometheus::ClientMetric made;
  made.label.reserve(labels.size());
  for (auto const& [name, text] : labels) {
    made.label.push_back({name, text});
  }
  return made;
}

}  // namespace

void metrics_text::sample(label_list const& labels, distribution const& values) {
  auto made = labelled(labels);
  auto& to = made.histogram;
  for (std::size_t i = 0; i < values.counts.size(); ++i) {
    to.sample_count += values.counts[i];
    to.bucket.push_back({to.sample_count, i < values.bounds.size()
                                              ? values.bounds[i]
                                              : std::numeric_limits<double>::infinity()});
  }
  to.sample_sum = values.sum;
  families_->list.back().metric.push_back(std::move(made));
}

void metrics_text::sample(label_list const& labels, double value) {
  auto made = labelled(labels);
  auto& into = families_->list.back();
  (into.type == prometheus::MetricType::Counter ? made.counter.value : made.gauge.value) = value;
  into.metric.push_back(std::move(made));
}

std::string metrics_text::text() const {
  std::vector<prometheus::MetricFamily> shown;
  std::copy_if(families_->list.begin(), families_->list.end(), std::back_inserter(shown),
               [](auto const& each) { return !each.metric.empty(); });
  // The one that takes no stream: the library may have been built with another C++ library's streams than this program.
  return prometheus::TextSerializer{}.Serialize(shown);
}

}  // namespace sluice::telemetry
