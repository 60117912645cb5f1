/// Reads traces of requests from files.
///
/// | format | what a line has |
/// |---|---|
/// | `azure-llm` | `TIMESTAMP,ContextTokens,GeneratedTokens`: a date with a fraction of a second, and numbers of tokens |
/// | `azure-functions` | `app,func,end_timestamp,duration` in seconds; a function is a model |
/// | `mooncake` | an object with `timestamp` in milliseconds, `input_length` and `output_length` in tokens |
/// | `csv` | columns `time_s`, and if there are any `model` and `service_s`; in whichever order |
///
/// The format is known by the first line. Where lines have no service time it is made of tokens, or the mean is taken; where they
/// have no model, requests go to the models by Zipf's distribution.
///
///   auto const read = read_trace("trace.csv", {.service_s = 0.05});
///   read.requests.size();
///
/// A line that cannot be read, a time that goes back and an unknown column throw `invalid_argument` with the file's name and the
/// line's number.
#pragma once

#include <cstdint>
#include <istream>
#include <string>

#include "runtime/simulator/trace.hpp"

namespace sluice::simulator {

/// How requests of a trace become requests of models here.
struct trace_reading {
  double service_s = 0.05;  ///< mean where a line says nothing of it
  double service_scv = 0.0;
  double per_context_token_s = 0.0;
  double per_generated_token_s = 0.0;  ///< if either is not 0, a request of tokens takes their sum
  std::uint32_t models = 1;            ///< for lines without a model
  double zipf_exponent = 1.0;
  std::uint64_t seed = 1;
  double speed = 1.0;  ///< so many times as fast as it was
};

[[nodiscard]] trace read_trace(std::string const& file, trace_reading const& how);

/// The same of a stream; `name` is what errors call it.
[[nodiscard]] trace read_trace(std::istream& from, std::string const& name,
                               trace_reading const& how);

}  // namespace sluice::simulator
