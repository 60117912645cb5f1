/// Which work took the device longer than the bound of run-ahead: what a pause may have to wait for.
///
/// Thread-safety: everything from any thread.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "runtime/gate/driver.hpp"

namespace sluice::gate {

/// What a call puts on the device, for people.
struct work_name {
  symbol call{};
  CUfunction function = nullptr;  ///< of a kernel
  std::uint64_t bytes = 0;        ///< of a copy, if the call says it in one number

  bool operator==(work_name const&) const = default;
};

struct long_unit {
  std::string name;
  std::chrono::nanoseconds takes;  ///< as last predicted
  std::uint64_t times;             ///< how often it has been launched as such
};

class long_units {
 public:
  /// Such a call has been given to the device. If there are too many kinds, the shortest goes.
  void note(work_name const& what, std::chrono::nanoseconds takes);
  /// The one that takes longest for 0, and so on; nothing behind the last.
  [[nodiscard]] std::optional<long_unit> at(std::size_t index) const;

 private:
  struct place {
    work_name what;
    long_unit unit;
  };
  static constexpr std::size_t most = 32;

  mutable std::mutex lock_;
  std::array<place, most> places_{};
  std::size_t used_ = 0;
};

}  // namespace sluice::gate
