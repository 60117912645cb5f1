/// Metrics in the text format that Prometheus reads, out of values that are collected for it.
///
///   metrics_text metrics;
///   metrics.family("sluice_pool_bytes", metrics_text::kind::gauge, "Memory by its owner.");
///   metrics.sample({{"owner", "training"}}, 4096.0);
///   metrics.text();   // "# HELP sluice_pool_bytes Memory by its owner.\n# TYPE …"
///
/// Source: the exposition formats of Prometheus, text version 0.0.4. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sluice::telemetry {

inline constexpr std::string_view metrics_content_type = "text/plain; version=0.0.4; charset=utf-8";

class metrics_text {
 public:
  enum class kind { counter, gauge, histogram };
  /// Values that were counted by size: `counts[i]` up to `bounds[i]`, those beyond in the last one, which has no bound.
  struct distribution {
    std::span<double const> bounds;  ///< ascending
    std::span<std::uint64_t const> counts;
    double sum = 0.0;
  };
  using label_list = std::vector<std::pair<std::string, std::string>>;

  metrics_text();
  metrics_text(metrics_text const&) = delete;
  metrics_text& operator=(metrics_text const&) = delete;
  ~metrics_text();

  /// Samples that follow are of this family. One without samples is left out. `help` is one line.
  void family(std::string name, kind what, std::string help);
  /// After a family.
  void sample(label_list const& labels, double value);
  /// After a family that is a histogram.
  void sample(label_list const& labels, distribution const& values);

  [[nodiscard]] std::string text() const;

 private:
  struct families;
  std::unique_ptr<families> families_;
};

}  // namespace sluice::telemetry
