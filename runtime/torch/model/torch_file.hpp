/// A TorchScript file's code and structure, read without the bytes of its weights. Includes torch; only for
/// the files that torch_model.hpp hides.
///
///   if (auto structure = read_structure(file)) {
///     // structure->module has all tensors, with their sizes, over memory that holds nothing;
///     // structure->unread says where in the file the bytes of each storage lie
///   }
///   auto module = read_whole(file);
///
/// The file is a zip archive in which each storage of an attribute is a record of its own, `data/N`, as a rule
/// not compressed. torch's reader has these records read straight into the storages' memory, from whoever
/// reads the file for it: here from one that leaves that memory as it is and keeps account of it. What the
/// code itself holds (`constants/N`) is always read.
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "runtime/server/hosting/model_file.hpp"

namespace sluice::server {

/// Bytes of the file.
struct file_range {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

struct torch_structure {
  torch::jit::Module module;
  std::unordered_map<void const*, file_range> unread;  ///< by the address of a storage's memory
};

/// Nothing if reading this file takes its tensors' contents: code of its own runs then, or torch packs weights
/// into another form; or if it cannot be read so, for whatever reason, of which `read_whole` will tell.
[[nodiscard]] std::optional<torch_structure> read_structure(
    std::shared_ptr<model_file const> const& file);

/// All of it. Throws what torch's reader does, and model_file.
[[nodiscard]] torch::jit::Module read_whole(std::shared_ptr<model_file const> const& file);

/// What a file is, in words, that torch has written and that is no TorchScript; nothing if it is not known.
[[nodiscard]] std::optional<std::string> other_format(
    std::shared_ptr<model_file const> const& file);

}  // namespace sluice::server
