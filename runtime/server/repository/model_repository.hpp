/// Reads a model repository in Triton's layout: which models there are, what they take and give,
/// where their files lie.
///
///   <root>/<model>/config.pbtxt
///   <root>/<model>/<version>/model.pt        version: a number, written without leading zeros
///
///   for (auto const& entry : read_repository({"/models"})) {
///     std::cout << entry.metadata.name << ": " << entry.file << '\n';
///   }
///
/// Nothing of a model's file is read, only that it is there. Names that begin with a dot, files
/// beside the model folders, and folders beside the versions that are no version are passed over,
/// the latter with a log line.
///
/// Throws `error`: `not_found` (repository, model, config.pbtxt, version, model file),
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

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

/// One version of one model. `metadata.versions` lists all that are served, oldest first.
struct model_entry {
  model_metadata metadata;      ///< shapes with the batch dimension, where there is one
  std::filesystem::path file;   ///< e.g. /models/add/3/model.pt
  std::string version;          ///< e.g. "3"
  std::int64_t max_batch_size;  ///< 0: no batch dimension was added to the shapes
  /// config.pbtxt with defaults filled in, as `GET v2/models/M/config` answers.
  nlohmann::json config;
};

/// The versions of one model that its version_policy selects (without one: the newest), oldest
/// first.
[[nodiscard]] std::vector<model_entry> read_model(std::filesystem::path const& root,
                                                  std::string const& name);

/// All models under all roots, by name, then by version.
[[nodiscard]] std::vector<model_entry> read_repository(
    std::vector<std::filesystem::path> const& roots);

}  // namespace sluice::server
