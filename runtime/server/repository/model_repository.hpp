/// Reads a model repository in Triton's layout: which models there are, what they take and give,
/// where their files lie.
///
///   <root>/<model>/config.pbtxt
///   <root>/<model>/<version>/model.pt        version: a number, written without leading zeros
///   <root>/<model>/warmup/<file>             where config.pbtxt names it as data of a warm-up
///
///   auto const found = read_repository({"/models"});
///   for (auto const& entry : found.models) {
///     std::cout << entry.metadata.name << ": " << entry.file << '\n';
///   }
///   for (auto const& each : found.unservable) {
///     std::cout << each.name << ": " << each.reason.what() << '\n';
///   }
///
/// Nothing of a model's file is read, only that it is there. Names that begin with a dot, files
/// beside the model folders, and folders beside the versions that are no version are passed over,
/// the latter with a log line. A folder that cannot be served stands in no other's way.
///
/// The reasons: `not_found` (model, config.pbtxt, version, model file, data of a warm-up),
/// `invalid_argument` (config.pbtxt does not parse or contradicts itself; file:line:column),
/// `unsupported` (another framework, or a feature whose absence would change answers),
/// `already_exists` (one model in two repositories).
///
/// Layout and version policy: Triton Inference Server, docs/user_guide/model_repository.md and
/// model_configuration.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/server/inference/batching.hpp"
#include "runtime/server/inference/computing_rules.hpp"
#include "runtime/server/inference/inference_service.hpp"
#include "runtime/server/inference/warmup.hpp"

namespace sluice::server {

/// One version of one model. `metadata.versions` lists all that are served, oldest first.
struct model_entry {
  model_metadata metadata;          ///< shapes with the batch dimension, where there is one
  std::filesystem::path file;       ///< e.g. /models/add/3/model.pt
  std::string version;              ///< e.g. "3"
  std::int64_t max_batch_size = 0;  ///< 0: no batch dimension was added to the shapes
  batching_rules batching{};
  computing_rules computing{};
  std::vector<warmup_sample> warmup{};  ///< files: with their folders, e.g. /models/add/warmup/x
  /// config.pbtxt with defaults filled in, as `GET v2/models/M/config` answers.
  nlohmann::json config;
};

struct repository_contents {
  std::vector<model_entry> models;           ///< by name, then by version
  std::vector<unservable_model> unservable;  ///< by name; no policy has been asked about them
};

/// The versions of one model that its version_policy selects (without one: the newest), oldest
/// first. Throws the reason why it cannot be served.
[[nodiscard]] std::vector<model_entry> read_model(std::filesystem::path const& root,
                                                  std::string const& name);

/// All models under all roots. Throws `not_found` if a root cannot be read, or there is no folder in any.
[[nodiscard]] repository_contents read_repository(std::vector<std::filesystem::path> const& roots);

}  // namespace sluice::server
