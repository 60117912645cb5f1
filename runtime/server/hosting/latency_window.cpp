#include "runtime/server/hosting/latency_window.hpp"

#include <algorithm>

namespace sluice::server {

void latency_window::add(std::chrono::nanoseconds value) {
  if (values_.size() < capacity) {
    values_.push_back(value);
  } else {
    values_[added_ % capacity] = value;
  }
  ++added_;
}

latency_window::quantiles latency_window::summary() const {
  if (values_.empty()) {
    return {};
  }
  auto sorted = values_;
  auto const at = [&](std::size_t percent) {
    auto const place =
        sorted.begin() + static_cast<std::ptrdiff_t>((sorted.size() * percent + 99) / 100 - 1);
    std::nth_element(sorted.begin(), place, sorted.end());
    return *place;
  };
  return {added_, at(50), at(99)};
}

}  // namespace sluice::server
