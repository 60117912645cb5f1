#include "runtime/server/repository/model_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "runtime/server/repository/config_fields.hpp"
#include "runtime/server/repository/config_json.hpp"
#include "runtime/server/repository/text_format.hpp"
#include "runtime/text/suggestion.hpp"

namespace sluice::server {
namespace {

using kind_t = text_value::kind_t;

/// Reads fields of one message, keeping the file's name for errors.
class config_reader {
 public:
  config_reader(std::string const& file, std::vector<std::string>& without_effect)
      : file_(file), without_effect_(without_effect) {}

  [[noreturn]] void fail(text_position where, std::string_view message,
                         error_kind kind = error_kind::invalid_argument) const {
    throw text_error(file_, where, message, kind);
  }

  template <std::size_t N>
  void check_fields(text_value const& message, std::array<known_field, N> const& known,
                    std::string_view what) const {
    for (auto const& field : message.fields) {
      auto const* const entry =
          std::find_if(known.begin(), known.end(),
                       [&](known_field const& candidate) { return candidate.name == field.name; });
      if (entry == known.end()) {
        std::array<std::string_view, N> names;
        std::transform(known.begin(), known.end(), names.begin(),
                       [](known_field const& candidate) { return candidate.name; });
        auto const meant = text::nearest(field.name, names);
        fail(field.where, fmt::format("{} has no field '{}'; {}", what, field.name,
                                      meant ? fmt::format("did you mean '{}'?", *meant)
                                            : fmt::format("known are {}", fmt::join(names, ", "))));
      }
      switch (entry->how) {
        case treatment::taken:
          break;
        case treatment::without_effect:
          without_effect_.push_back(fmt::format("line {}: {}", field.where.line, field.name));
          break;
        case treatment::unsupported_if_true:
          if (!boolean(field)) break;
          [[fallthrough]];
        case treatment::unsupported:
          fail(field.where,
               fmt::format("'{}' is not supported here, and leaving it out would change answers",
                           field.name),
               error_kind::unsupported);
      }
    }
  }

  /// The only mention of a field that does not repeat, or null.
  [[nodiscard]] text_value const* single(text_value const& message, std::string_view name) const {
    text_value const* result = nullptr;
    for (auto const& field : message.fields) {
      if (field.name != name) continue;
      if (result != nullptr) {
        fail(field.where, fmt::format("'{}' is given a second time (first in line {})", name,
                                      result->where.line));
      }
      if (field.list) fail(field.where, fmt::format("'{}' takes one value, not a list", name));
      result = &field.values.front();
    }
    return result;
  }

  [[nodiscard]] static std::vector<text_value const*> repeated(text_value const& message,
                                                               std::string_view name) {
    std::vector<text_value const*> result;
    for (auto const& field : message.fields) {
      if (field.name != name) continue;
      for (auto const& value : field.values) result.push_back(&value);
    }
    return result;
  }

  [[nodiscard]] std::optional<std::string> string(text_value const& message,
                                                  std::string_view name) const {
    auto const* const value = single(message, name);
    if (value == nullptr) return std::nullopt;
    if (value->kind != kind_t::string) {
      fail(value->where, fmt::format("'{}' takes a string in quotes", name));
    }
    if (value->text.empty()) return std::nullopt;  // protobuf does not tell "" from absent
    return value->text;
  }

  [[nodiscard]] std::int64_t integer(text_value const& value, std::string_view name) const {
    if (value.kind != kind_t::integer) {
      fail(value.where, fmt::format("'{}' takes an integer", name));
    }
    if (value.magnitude > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      fail(value.where, fmt::format("'{}' does not fit 64 bits", name));
    }
    auto const magnitude = static_cast<std::int64_t>(value.magnitude);
    return value.negative ? -magnitude : magnitude;
  }

  [[nodiscard]] std::vector<tensor_spec> tensors(text_value const& config, std::string_view what,
                                                 bool batched) const {
    std::vector<tensor_spec> result;
    std::set<std::string> names;
    for (auto const* const value : repeated(config, what)) {
      if (value->kind != kind_t::message) {
        fail(value->where, fmt::format("'{0}' takes a message: {0} {{ … }}", what));
      }
      result.push_back(tensor(*value, what, batched));
      if (!names.insert(result.back().name).second) {
        fail(value->where, fmt::format("there are two {}s named '{}'", what, result.back().name));
      }
    }
    if (result.empty()) {
      fail(config.where,
           fmt::format(
               "the model has no {0}; describe each by {0} {{ name: \"…\" data_type: TYPE_FP32 "
               "dims: [ … ] }}",
               what));
    }
    return result;
  }

  [[nodiscard]] version_policy versions(text_value const& config) const {
    version_policy result;
    auto const* const policy = single(config, "version_policy");
    if (policy == nullptr) return result;
    if (policy->kind != kind_t::message || policy->fields.size() != 1 || policy->fields[0].list ||
        policy->fields[0].values[0].kind != kind_t::message) {
      fail(policy->where,
           "version_policy takes exactly one of latest { num_versions: 1 }, all { }, "
           "specific { versions: [ 1, 3 ] }");
    }
    auto const& choice = policy->fields[0];
    auto const& body = choice.values[0];
    if (choice.name == "latest") {
      check_fields(body, std::array<known_field, 1>{{{"num_versions", treatment::taken}}},
                   "latest");
      if (auto const* const count = single(body, "num_versions")) {
        result.latest = positive(*count, "num_versions");
      }
    } else if (choice.name == "all") {
      if (!body.fields.empty()) fail(body.fields[0].where, "all { } has no fields");
      result.kind = version_policy::kind_t::all;
    } else if (choice.name == "specific") {
      check_fields(body, std::array<known_field, 1>{{{"versions", treatment::taken}}}, "specific");
      result.kind = version_policy::kind_t::specific;
      for (auto const* const version : repeated(body, "versions")) {
        result.specific.push_back(positive(*version, "versions"));
      }
      if (result.specific.empty()) {
        fail(body.where, "specific needs at least one of versions: [ … ]");
      }
    } else {
      fail(choice.where,
           fmt::format("version_policy has no choice '{}'; take latest, all or specific",
                       choice.name));
    }
    return result;
  }

 private:
  [[nodiscard]] bool boolean(text_field const& field) const {
    if (field.list) fail(field.where, fmt::format("'{}' takes one value, not a list", field.name));
    auto const& value = field.values.front();
    if (value.kind == kind_t::identifier) {
      if (value.text == "true" || value.text == "True" || value.text == "t") return true;
      if (value.text == "false" || value.text == "False" || value.text == "f") return false;
    } else if (value.kind == kind_t::integer && value.magnitude <= 1) {
      return value.magnitude == 1;
    }
    fail(value.where, fmt::format("'{}' takes true or false", field.name));
  }

  [[nodiscard]] std::uint64_t positive(text_value const& value, std::string_view name) const {
    auto const number = integer(value, name);
    if (number < 1) {
      fail(value.where, fmt::format("'{}' is {}; it must be at least 1", name, number));
    }
    return static_cast<std::uint64_t>(number);
  }

  [[nodiscard]] tensor_spec tensor(text_value const& message, std::string_view what,
                                   bool batched) const {
    if (what == "input") {
      check_fields(message, input_fields, "an input");
    } else {
      check_fields(message, output_fields, "an output");
    }
    tensor_spec result;
    auto name = string(message, "name");
    if (!name) fail(message.where, fmt::format("this {} needs a name: \"…\"", what));
    result.name = std::move(*name);
    result.type = type(message, what, result.name);
    if (batched) result.shape.push_back(-1);
    auto const mentions_dims =
        std::any_of(message.fields.begin(), message.fields.end(),
                    [](text_field const& field) { return field.name == "dims"; });
    if (!mentions_dims) {
      fail(message.where,
           fmt::format("{} '{}' needs dims: [ … ]; dims: [ ] means a scalar", what, result.name));
    }
    for (auto const* const value : repeated(message, "dims")) {
      auto const extent = integer(*value, "dims");
      if (extent < 1 && extent != -1) {
        fail(value->where,
             fmt::format(
                 "{} '{}' has a dimension of {}; it must be at least 1, or -1 where it varies",
                 what, result.name, extent));
      }
      result.shape.push_back(extent);
    }
    return result;
  }

  [[nodiscard]] datatype type(text_value const& message, std::string_view what,
                              std::string const& name) const {
    auto const* const value = single(message, "data_type");
    if (value == nullptr) {
      fail(message.where, fmt::format("{} '{}' needs a data_type: TYPE_…", what, name));
    }
    if (value->kind == kind_t::identifier) {
      auto const* const found =
          std::find_if(type_names.begin(), type_names.end(),
                       [&](type_name const& candidate) { return candidate.name == value->text; });
      if (found != type_names.end()) return found->type;
    }
    std::vector<std::string_view> names;
    names.reserve(type_names.size());
    for (auto const& candidate : type_names) names.push_back(candidate.name);
    fail(value->where, fmt::format("{} '{}' has an unknown data_type; take one of {}", what, name,
                                   fmt::join(names, ", ")));
  }

  std::string const& file_;
  std::vector<std::string>& without_effect_;
};

void check_platform(config_reader const& reader, text_value const& tree) {
  auto const platform = reader.string(tree, "platform");
  auto const backend = reader.string(tree, "backend");
  if (platform && *platform != "pytorch_libtorch") {
    reader.fail(
        reader.single(tree, "platform")->where,
        fmt::format("platform '{}' is not supported; only \"pytorch_libtorch\" (TorchScript) is",
                    *platform),
        error_kind::unsupported);
  }
  if (backend && *backend != "pytorch") {
    reader.fail(
        reader.single(tree, "backend")->where,
        fmt::format("backend '{}' is not supported; only \"pytorch\" (TorchScript) is", *backend),
        error_kind::unsupported);
  }
  if (!platform && !backend) {
    reader.fail(tree.where,
                "the file must say platform: \"pytorch_libtorch\" or backend: \"pytorch\"");
  }
}

void fill_json(model_config& config, text_value const& tree) {
  auto& shown = config.json;
  shown = config_to_json(tree);
  shown["platform"] = "pytorch_libtorch";
  shown["backend"] = "pytorch";
  shown["max_batch_size"] = config.max_batch_size;
  shown["default_model_filename"] = config.model_filename;
  if (!shown.contains("version_policy")) {
    shown["version_policy"] = {{"latest", {{"num_versions", 1}}}};
  }
}

}  // namespace

model_config read_model_config(std::string_view text, std::string const& file) {
  auto const tree = parse_text_format(text, file);
  model_config config;
  config_reader const reader{file, config.without_effect};
  reader.check_fields(tree, model_fields, "a model configuration");
  check_platform(reader, tree);
  config.name = reader.string(tree, "name").value_or("");
  if (auto const* const value = reader.single(tree, "max_batch_size")) {
    config.max_batch_size = reader.integer(*value, "max_batch_size");
    if (config.max_batch_size < 0 ||
        config.max_batch_size > std::numeric_limits<std::int32_t>::max()) {
      reader.fail(value->where,
                  "max_batch_size must be 0 (no batching) or a positive 32-bit number");
    }
  }
  bool const batched = config.max_batch_size > 0;
  config.inputs = reader.tensors(tree, "input", batched);
  config.outputs = reader.tensors(tree, "output", batched);
  config.versions = reader.versions(tree);
  if (auto filename = reader.string(tree, "default_model_filename")) {
    if (filename->find('/') != std::string::npos || filename->find('\0') != std::string::npos ||
        *filename == "." || *filename == "..") {
      reader.fail(reader.single(tree, "default_model_filename")->where,
                  "default_model_filename must be a file's name without folders");
    }
    config.model_filename = std::move(*filename);
  }
  fill_json(config, tree);
  return config;
}

}  // namespace sluice::server
