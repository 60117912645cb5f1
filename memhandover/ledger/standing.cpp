#include "memhandover/ledger/standing.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "memhandover/base/error.hpp"
#include "memhandover/base/shared_text.hpp"

namespace sluice::memhandover {
namespace {

constexpr std::array priorities{priority::low, priority::normal, priority::high};

}  // namespace

job_standing standing_of(client_entry const& entry, std::uint32_t chunk_count) noexcept {
  auto const rank = priority{entry.rank.load(std::memory_order_relaxed)};
  bool const is_known = std::find(priorities.begin(), priorities.end(), rank) != priorities.end();
  return {is_known ? rank : priority::normal,
          std::min(entry.least_chunks.load(std::memory_order_relaxed), chunk_count)};
}

char const* name_of(priority rank) noexcept {
  switch (rank) {
    case priority::low:
      return "low";
    case priority::normal:
      return "normal";
    case priority::high:
      return "high";
  }
  return "unknown";
}

priority priority_named(std::string_view name) {
  for (auto const rank : priorities) {
    if (name == name_of(rank)) {
      return rank;
    }
  }
  throw error{error_kind::invalid_argument,
              "a job's priority is \"" + readable_text(name) + "\", must be low, normal or high"};
}

}  // namespace sluice::memhandover
