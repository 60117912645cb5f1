/// What Sluice takes from a model's config.pbtxt (Triton's ModelConfig, in protobuf's text format).
///
///   auto config = read_model_config(text, "/models/add/config.pbtxt");
///   config.inputs[0].shape;   // {-1, 4} for max_batch_size: 8 and dims: [ 4 ]
///
/// Taken: name, platform/backend, max_batch_size, input, output, default_model_filename,
/// version_policy, dynamic_batching, model_warmup, the counts of instance_group, optimization's cuda graphs. Fields of Triton's that only tune its own
/// scheduling are passed over and listed in `without_effect`; those that would change what a request
/// means throw `unsupported`; names that Triton does not know throw `invalid_argument`, as in
/// Triton. Beyond Triton, `dims: [ ]` describes a scalar. Pure.
///
/// Source: Triton, common/protobuf/model_config.proto and docs/user_guide/model_configuration.md.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/inference/batching.hpp"
#include "runtime/server/inference/computing_rules.hpp"
#include "runtime/server/inference/inference_service.hpp"
#include "runtime/server/inference/warmup.hpp"

namespace sluice::server {

struct version_policy {
  enum class kind_t { latest, all, specific };
  kind_t kind = kind_t::latest;
  std::uint64_t latest = 1;             ///< kind latest: how many
  std::vector<std::uint64_t> specific;  ///< kind specific: which
};

struct model_config {
  std::string name;  ///< empty when the file leaves it to the folder
  std::int64_t max_batch_size = 0;
  batching_rules batching;  ///< of `max_batch_size` and `dynamic_batching`
  /// Shapes with the batch dimension −1 in front if max_batch_size > 0.
  std::vector<tensor_spec> inputs;
  std::vector<tensor_spec> outputs;
  std::string model_filename = "model.pt";
  version_policy versions;
  computing_rules computing;
  std::vector<warmup_sample> warmup;        ///< files: as named in the model's folder `warmup`
  nlohmann::json json;                      ///< the file, with defaults filled in
  std::vector<std::string> without_effect;  ///< "line 12: metric_tags"
};

/// `file` is only a name for messages. Throws `error`, with file:line:column where the fault has a
/// place.
[[nodiscard]] model_config read_model_config(std::string_view text, std::string const& file);

}  // namespace sluice::server
