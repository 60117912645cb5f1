/// `sluice simulate`: what policies would do with a trace of requests, without a device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sluice::cli {

/// As words of the command line; amounts with their units have been checked.
struct simulate_arguments {
  std::string trace;
  std::vector<std::string> policies;
  unsigned gpus = 1;
  unsigned models = 1;
  unsigned parallel = 1;
  unsigned instances = 1;
  std::vector<double> slowdown;
  std::string latency = "200ms", percentile = "99%", attainment = "99%", window = "5m";
  std::vector<std::string> sizes{"1GiB"};      ///< one, or of each model
  std::vector<std::string> memories{"80GiB"};  ///< one, or of each device
  std::string place;                           ///< empty: by work, and nothing is said of it
  std::string place_timeout, place_csv;
  std::string service = "50ms";
  std::optional<double> service_scv;  ///< 1 for generated requests, 0 for a trace's
  std::string per_context_token, per_generated_token;
  std::string length = "1h", skip;
  std::string handover, load;  ///< instead of the records'
  std::string records, machine;
  std::string csv;
  double zipf = 1.0;
  double speed = 1.0;
  std::uint64_t seed = 1;
  bool refuse = false;
  unsigned retries = 0;
};

/// Prints a table, and progress on standard error if that is a terminal. 0; failures are thrown as `sluice::error`.
int run_simulations(simulate_arguments const& arguments);

}  // namespace sluice::cli
