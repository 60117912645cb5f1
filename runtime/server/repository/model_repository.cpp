#include "runtime/server/repository/model_repository.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/numbers.hpp"
#include "runtime/server/inference/datatypes.hpp"
#include "runtime/server/repository/model_config.hpp"

namespace sluice::server {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view warmup_folder = "warmup";
constexpr std::uintmax_t max_config_bytes = std::uintmax_t{1} << 20U;

/// The names of the folders in `folder`, sorted, without those that begin with a dot.
std::vector<std::string> folders_in(fs::path const& folder, std::string_view what) {
  std::error_code failure;
  std::vector<std::string> names;
  fs::directory_iterator entries{folder, failure};
  while (!failure && entries != fs::directory_iterator{}) {
    auto name = entries->path().filename().string();
    std::error_code unreadable;  // a dangling link is no folder, and no reason to stop
    if (!name.starts_with('.') && entries->is_directory(unreadable)) {
      names.push_back(std::move(name));
    }
    entries.increment(failure);
  }
  if (failure) {
    throw error{error_kind::not_found,
                fmt::format("cannot read the {} {}: {}", what, folder.string(), failure.message())};
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// What stands in the place of a file; nothing if it is one. Links are followed.
std::optional<std::string> no_file(fs::path const& path) {
  std::error_code failure;
  auto const is = fs::status(path, failure).type();
  switch (is) {
    case fs::file_type::regular:
      return std::nullopt;
    case fs::file_type::not_found:
      return "is missing";
    case fs::file_type::directory:
      return "is a folder, not a file";
    case fs::file_type::fifo:
      return "is a FIFO, not a file";
    case fs::file_type::socket:
      return "is a socket, not a file";
    case fs::file_type::character:
    case fs::file_type::block:
      return "is a device, not a file";
    default:
      return failure ? fmt::format("cannot be read: {}", failure.message()) : "is not a file";
  }
}

std::string read_config_file(fs::path const& path) {
  if (auto const instead = no_file(path)) {
    throw error{
        error_kind::not_found,
        fmt::format("{} {}; it must say the platform, the inputs and the outputs of the model",
                    path.string(), *instead)};
  }
  std::error_code failure;
  auto const size = fs::file_size(path, failure);
  if (!failure && size > max_config_bytes) {
    throw error{error_kind::invalid_argument,
                fmt::format("{} has {} bytes; a model configuration has at most {}", path.string(),
                            size, max_config_bytes)};
  }
  std::ifstream file{path, std::ios::binary};
  std::string text{std::istreambuf_iterator<char>{file}, std::istreambuf_iterator<char>{}};
  if (!file) throw error{error_kind::not_found, fmt::format("cannot read {}", path.string())};
  return text;
}

/// Triton's rule: digits without a leading zero.
std::optional<std::uint64_t> version_number(std::string const& name) {
  return name.starts_with('0') ? std::nullopt : parse_number<std::uint64_t>(name);
}

std::vector<std::uint64_t> versions_present(fs::path const& folder) {
  std::vector<std::uint64_t> present;
  for (auto const& name : folders_in(folder, "model folder")) {
    if (auto const number = version_number(name)) {
      present.push_back(*number);
    } else if (name != warmup_folder) {
      spdlog::info("folder passed over, its name is no version number folder={}",
                   (folder / name).string());
    }
  }
  std::sort(present.begin(), present.end());
  if (present.empty()) {
    throw error{
        error_kind::not_found,
        fmt::format("{0} has no version; put the model's file at {0}/1/model.pt", folder.string())};
  }
  return present;
}

std::vector<std::uint64_t> select(version_policy const& policy, std::vector<std::uint64_t> present,
                                  fs::path const& folder) {
  switch (policy.kind) {
    case version_policy::kind_t::all:
      return present;
    case version_policy::kind_t::latest:
      if (policy.latest < present.size()) {
        present.erase(present.begin(), present.end() - static_cast<std::ptrdiff_t>(policy.latest));
      }
      return present;
    case version_policy::kind_t::specific:
      break;
  }
  std::vector<std::uint64_t> wanted = policy.specific;
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  for (auto const version : wanted) {
    if (!std::binary_search(present.begin(), present.end(), version)) {
      throw error{error_kind::not_found,
                  fmt::format("{} asks for version {}, but there is no folder {}",
                              (folder / "config.pbtxt").string(), version,
                              (folder / std::to_string(version)).string())};
    }
  }
  return wanted;
}

void check_model_file(fs::path const& path) {
  if (auto const instead = no_file(path)) {
    throw error{error_kind::not_found,
                fmt::format("the model file {} {}", path.string(), *instead)};
  }
  std::error_code failure;
  if (fs::file_size(path, failure) == 0) {
    throw error{error_kind::invalid_argument,
                fmt::format("the model file {} is empty", path.string())};
  }
}

/// Puts the model's folder before the names of files that warm-ups read, which must be there.
void find_warmup_files(model_config& config, fs::path const& folder) {
  for (auto& sample : config.warmup) {
    for (auto& input : sample.inputs) {
      if (input.data != warmup_input::source::file) {
        continue;
      }
      input.file = folder / warmup_folder / input.file;
      auto wrong = no_file(input.file);
      std::error_code failure;
      if (!wrong && fs::file_size(input.file, failure) < input.bytes) {
        wrong = fmt::format("is shorter than the {} bytes of the input", input.bytes);
      }
      if (wrong) {
        throw error{error_kind::not_found,
                    fmt::format("{}: model_warmup '{}': the data of input '{}': {} {}",
                                (folder / "config.pbtxt").string(), sample.name, input.name,
                                input.file.string(), *wrong)};
      }
    }
  }
}

void check_name(std::string const& name, fs::path const& root) {
  if (!is_utf8(name)) {
    throw error{
        error_kind::invalid_argument,
        fmt::format("a model folder in {} has a name that is not UTF-8; rename it", root.string())};
  }
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    throw error{
        error_kind::not_found,
        fmt::format("'{}' cannot be the name of a model folder in {}", name, root.string())};
  }
}

void check_alone(std::string const& name, std::vector<fs::path> const& homes) {
  if (homes.size() > 1) {
    throw error{error_kind::already_exists,
                fmt::format("model '{}' is in two repositories: {} and {}", name, homes[0].string(),
                            homes[1].string())};
  }
}

/// The name itself, or one that can be shown for it.
std::string as_utf8(std::string name) {
  if (!is_utf8(name)) {
    std::replace_if(
        name.begin(), name.end(), [](char each) { return static_cast<signed char>(each) < 0; },
        '?');
  }
  return name;
}

}  // namespace

std::vector<model_entry> read_model(fs::path const& root, std::string const& name) {
  check_name(name, root);
  auto const folder = root / name;
  std::error_code failure;
  if (!fs::is_directory(folder, failure)) {
    throw error{error_kind::not_found,
                fmt::format("the model repository {} has no model '{}'; it has: {}", root.string(),
                            name, fmt::join(folders_in(root, "model repository"), ", "))};
  }
  auto const config_path = folder / "config.pbtxt";
  auto config = read_model_config(read_config_file(config_path), config_path.string());
  if (!config.name.empty() && config.name != name) {
    throw error{
        error_kind::invalid_argument,
        fmt::format(
            "{}: name is '{}' but the folder is '{}'; make them equal or leave the name out",
            config_path.string(), config.name, name)};
  }
  config.json["name"] = name;
  if (!config.without_effect.empty()) {
    spdlog::warn("fields have no effect here file={} fields=\"{}\"", config_path.string(),
                 fmt::join(config.without_effect, ", "));
  }

  find_warmup_files(config, folder);
  model_metadata metadata{
      name, {}, "pytorch_libtorch", std::move(config.inputs), std::move(config.outputs)};
  std::vector<model_entry> entries;
  for (auto const number : select(config.versions, versions_present(folder), folder)) {
    auto version = std::to_string(number);
    auto file = folder / version / config.model_filename;
    check_model_file(file);
    metadata.versions.push_back(version);
    entries.push_back({.metadata = {},
                       .file = std::move(file),
                       .version = std::move(version),
                       .max_batch_size = config.max_batch_size,
                       .batching = config.batching,
                       .computing = config.computing,
                       .warmup = config.warmup,
                       .config = config.json});
  }
  for (auto& entry : entries) entry.metadata = metadata;
  return entries;
}

repository_contents read_repository(std::vector<fs::path> const& roots) {
  std::map<std::string, std::vector<fs::path>> homes;
  for (auto const& root : roots) {
    for (auto& name : folders_in(root, "model repository")) {
      homes[std::move(name)].push_back(root);
    }
  }
  if (homes.empty()) {
    std::vector<std::string> names;
    names.reserve(roots.size());
    for (auto const& root : roots) names.push_back(root.string());
    throw error{error_kind::not_found,
                fmt::format("no model in the model repository {}; put one at "
                            "<repository>/<model>/config.pbtxt and <repository>/<model>/1/model.pt",
                            fmt::join(names, ", "))};
  }
  repository_contents found;
  for (auto const& [name, its_homes] : homes) {
    try {
      check_alone(name, its_homes);
      auto versions = read_model(its_homes.front(), name);
      std::move(versions.begin(), versions.end(), std::back_inserter(found.models));
    } catch (error const& reason) {
      found.unservable.push_back({as_utf8(name), reason});
    } catch (std::exception const& reason) {
      found.unservable.push_back({as_utf8(name), {error_kind::internal, reason.what()}});
    }
  }
  return found;
}

}  // namespace sluice::server
