/// Requests that a model computes before its first one, as its configuration describes them.
///
/// Source: Triton, common/protobuf/model_config.proto, ModelWarmup.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

struct warmup_input {
  enum class source { zeros, random, file };

  std::string name;
  datatype type = datatype::fp32;
  std::vector<std::int64_t> shape;  ///< of one sample: without the batch dimension
  std::uint64_t bytes = 0;          ///< of one sample; 0 for BYTES, whose elements differ in size
  source data = source::zeros;
  /// The elements of one sample as a binary tensor has them; `source::file` only. More may follow.
  std::filesystem::path file{};

  bool operator==(warmup_input const&) const = default;
};

struct warmup_sample {
  std::string name;
  std::int64_t batch_size = 1;       ///< at least 1; each of the batch's samples is the same
  std::uint32_t count = 1;           ///< how often it is computed, at least once
  std::vector<warmup_input> inputs;  ///< all of the model's, in its order

  bool operator==(warmup_sample const&) const = default;
};

}  // namespace sluice::server
