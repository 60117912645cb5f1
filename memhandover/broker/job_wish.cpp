#include "memhandover/broker/job_wish.hpp"

#include <cmath>

#include "memhandover/base/error.hpp"
#include "memhandover/base/numbers.hpp"
#include "memhandover/base/shared_text.hpp"
#include "memhandover/broker/conversation.hpp"

namespace sluice::memhandover {
namespace {

[[noreturn]] void refuse_least(std::string const& text) {
  throw error{error_kind::invalid_argument,
              "SLUICE_MIN_MEMORY is \"" + readable_text(text) +
                  "\", must be a number of bytes, or a percentage of the pool from 0% to 100% "
                  "(`sluice run --min-memory` sets it, from 4GiB or 25%); correct or unset it"};
}

}  // namespace

std::uint64_t job_wish::chunks_of(pool_shape const& pool) const noexcept {
  if (least_ppm > 0) {
    return (std::uint64_t{least_ppm} * pool.chunk_count + whole_in_ppm - 1) / whole_in_ppm;
  }
  return least_bytes / pool.chunk_bytes + (least_bytes % pool.chunk_bytes == 0 ? 0 : 1);
}

job_wish job_wish_in(std::string const& rank, std::string const& least) {
  job_wish wish;
  if (!rank.empty()) {
    try {
      wish.rank = priority_named(rank);
    } catch (error const&) {
      throw error{error_kind::invalid_argument,
                  "SLUICE_PRIORITY is \"" + readable_text(rank) +
                      "\", must be low, normal or high; correct or unset it"};
    }
  }
  if (!least.empty() && least.back() == '%') {
    constexpr double all = 100;
    auto const percent = parse_number<double>(std::string_view{least}.substr(0, least.size() - 1));
    if (!percent || !(*percent >= 0 && *percent <= all)) {
      refuse_least(least);
    }
    wish.least_ppm = static_cast<std::uint32_t>(std::lround(*percent / all * whole_in_ppm));
  } else if (!least.empty()) {
    auto const bytes = parse_number<std::uint64_t>(least);
    if (!bytes) {
      refuse_least(least);
    }
    wish.least_bytes = *bytes;
  }
  return wish;
}

void add_wish(nlohmann::json& join, job_wish const& wish) {
  if (wish.rank != priority::normal) {
    join["priority"] = name_of(wish.rank);
  }
  if (wish.least_ppm > 0) {
    join["least_ppm"] = wish.least_ppm;
  } else if (wish.least_bytes > 0) {
    join["least_bytes"] = wish.least_bytes;
  }
}

job_wish wish_in(nlohmann::json const& join) {
  job_wish wish{
      .rank = priority_named(field(join, "priority", std::string{name_of(priority::normal)})),
      .least_bytes = field(join, "least_bytes", std::uint64_t{0}),
      .least_ppm = field(join, "least_ppm", std::uint32_t{0})};
  if (wish.least_ppm > whole_in_ppm) {
    throw error{error_kind::invalid_argument,
                "a job's minimum is " + std::to_string(wish.least_ppm) +
                    " millionths of the pool, and must be at most all of it"};
  }
  return wish;
}

}  // namespace sluice::memhandover
