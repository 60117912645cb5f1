#include "runtime/server/repository/config_json.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace sluice::server {
namespace {

using nlohmann::json;

// Repeated and map fields of ModelConfig and of the messages in it. Their names do not clash with
// singular fields.
constexpr auto repeated_fields = std::to_array<std::string_view>({"agents",
                                                                  "batch_input",
                                                                  "batch_output",
                                                                  "bool_false_true",
                                                                  "buckets",
                                                                  "control",
                                                                  "control_input",
                                                                  "cpu_execution_accelerator",
                                                                  "dims",
                                                                  "fp32_false_true",
                                                                  "gpu_execution_accelerator",
                                                                  "gpus",
                                                                  "graph_spec",
                                                                  "initial_state",
                                                                  "input",
                                                                  "instance_group",
                                                                  "int32_false_true",
                                                                  "metric_control",
                                                                  "model_warmup",
                                                                  "op_library_filename",
                                                                  "output",
                                                                  "preferred_batch_size",
                                                                  "profile",
                                                                  "resources",
                                                                  "secondary_devices",
                                                                  "shape",
                                                                  "source_input",
                                                                  "state",
                                                                  "step",
                                                                  "target_name",
                                                                  "versions"});
constexpr auto map_fields =
    std::to_array<std::string_view>({"cc_model_filenames", "input_map", "inputs", "metric_tags",
                                     "output_map", "parameters", "priority_queue_policy"});

template <std::size_t N>
bool contains(std::array<std::string_view, N> const& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

json value_to_json(text_value const& value) {
  switch (value.kind) {
    case text_value::kind_t::identifier:
      if (value.text == "true" || value.text == "True" || value.text == "t") return true;
      if (value.text == "false" || value.text == "False" || value.text == "f") return false;
      return value.text;
    case text_value::kind_t::integer:
      // the magnitude is at most 2^63 when negative; negating unsigned is exact there
      if (value.negative) return static_cast<std::int64_t>(std::uint64_t{0} - value.magnitude);
      return value.magnitude;
    case text_value::kind_t::real:
      return value.real;
    case text_value::kind_t::string:
      return value.text;
    case text_value::kind_t::message:
      return config_to_json(value);
  }
  return nullptr;
}

std::string key_text(json const& key) {
  return key.is_string() ? key.get<std::string>() : key.dump();
}

/// A map entry is a message with the fields `key` and `value`.
bool add_map_entry(json& map, text_value const& entry) {
  if (entry.kind != text_value::kind_t::message) return false;
  json const fields = config_to_json(entry);
  if (!fields.contains("key")) return false;
  map[key_text(fields["key"])] = fields.value("value", json::object());
  return true;
}

}  // namespace

json config_to_json(text_value const& message) {
  json result = json::object();
  for (auto const& field : message.fields) {
    if (contains(map_fields, field.name)) {
      json map = result.value(field.name, json::object());
      bool const is_map = map.is_object() &&
                          std::all_of(field.values.begin(), field.values.end(),
                                      [&](auto const& entry) { return add_map_entry(map, entry); });
      if (is_map) {
        result[field.name] = std::move(map);
        continue;
      }
    }
    bool const repeated =
        field.list || contains(repeated_fields, field.name) || result.contains(field.name);
    if (!repeated) {
      result[field.name] = value_to_json(field.values.front());
      continue;
    }
    json& all = result[field.name];
    if (!all.is_array()) all = all.is_null() ? json::array() : json::array({all});
    for (auto const& value : field.values) all.push_back(value_to_json(value));
  }
  return result;
}

}  // namespace sluice::server
