/// What a server has learnt of its models, as the text of a file.
///
/// The first line has the version, and what shows that the rest is whole: `sluice-experience 2 crc32 8f3ba210 bytes 5120`. The rest is
/// one JSON object, with the time at which it was written down and a list of models.
///
///   auto const text = text_of(all);
///   read_experiences(text).models;   // those of `all`
///
/// Pure functions. `read_experiences` throws `error` of kind `invalid_argument`, saying what is wrong, for whatever else it is
/// given; numbers that no model can have are found when they are recalled (model_controller.hpp).
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "scheduler/model_controller.hpp"

namespace sluice::server {

/// Of one model.
struct model_experience {
  std::string model;       ///< its name, a slash, its version
  std::string stands_for;  ///< which weights, and where: with others it is another model
  scheduler::experience learnt;
};

struct experiences {
  std::chrono::system_clock::time_point saved_at;
  std::vector<model_experience> models;
};

[[nodiscard]] std::string text_of(experiences const& all);
[[nodiscard]] experiences read_experiences(std::string_view text);

}  // namespace sluice::server
