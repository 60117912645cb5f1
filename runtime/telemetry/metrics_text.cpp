#include "runtime/telemetry/metrics_text.hpp"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <iterator>

namespace sluice::telemetry {

struct metrics_text::families {
  std::vector<prometheus::MetricFamily> list;
};

metrics_text::metrics_text() : families_(std::make_unique<families>()) {}
metrics_text::~metrics_text() = default;

void metrics_text::family(std::string name, kind what, std::string help) {
  auto const type =
      what == kind::counter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
  families_->list.push_back({std::move(name), std::move(help), type, {}});
}

void metrics_text::sample(label_list const& labels, double value) {
  prometheus::ClientMetric made;
  made.label.reserve(labels.size());
  for (auto const& [name, text] : labels) {
    made.label.push_back({name, text});
  }
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
