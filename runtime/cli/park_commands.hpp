/// `sluice park` and `sluice wake`: a job goes to host copies because its operator wants that, and stays there.
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace sluice::cli {

struct park_arguments {
  std::string job;  ///< its pid or its name
  std::string runtime_dir;
  std::optional<int> device;           ///< of the pool; any if it is not given
  std::chrono::milliseconds length{};  ///< zero: until it is woken
};

/// A training job in what `query_status` says.
struct found_job {
  std::uint64_t pool_id = 0;
  nlohmann::json client;
};

/// The job with that pid or, if there is none, that name: each place that its process has in the pool, those first that are to be parked
/// first, a KV cache before what computes with it. Throws `not_found` with those that there are, `invalid_argument` where processes
/// have the name, `unsupported` for what is no training job.
[[nodiscard]] std::vector<found_job> find_job(nlohmann::json const& status, std::string const& job);

/// Has it parked, waits until all has gone that can, and prints what has. Ending the command ends no order. Throws as
/// `find_job` and `order_park`, and `deadline_exceeded` where it has not gone for long.
int park(park_arguments const& arguments);

/// Lets it come back, and prints what it waits for.
int wake(park_arguments const& arguments);

}  // namespace sluice::cli
