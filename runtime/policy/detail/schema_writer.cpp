#include "runtime/policy/detail/schema_writer.hpp"

#include <fmt/format.h>

#include "runtime/policy/detail/description.hpp"
#include "runtime/policy/units.hpp"

namespace sluice::policy {
namespace detail {
namespace {

using json = nlohmann::ordered_json;

std::string whole(std::string_view pattern) {
  return fmt::format("^({})$", pattern);
}

json matching(std::string_view pattern) {
  return {{"type", "string"}, {"pattern", whole(pattern)}};
}

}  // namespace

void schema_writer::put(key const& what, json const& entry) {
  json described{{"description", what.meaning}};
  described.update(entry);
  if (what.required) {
    described.erase("default");  // a key that must be given has none
    required_.push_back(what.name);
  }
  properties_[std::string{what.name}] = std::move(described);
}

void schema_writer::boolean(key const& what, bool& value) {
  put(what, {{"type", "boolean"}, {"default", value}});
}

void schema_writer::whole_number(key const& what, std::int64_t& value,
                                 limits<std::int64_t> allowed) {
  if (allowed.least == allowed.most) {
    put(what, {{"const", allowed.least}});
    return;
  }
  nlohmann::ordered_json entry{
      {"type", "integer"}, {"minimum", allowed.least}, {"maximum", allowed.most}};
  if (value >= allowed.least) entry["default"] = value;  // else there is none
  put(what, entry);
}

void schema_writer::text(key const& what, std::string& value, text_rule const& rule) {
  auto entry = matching(rule.pattern);
  if (!value.empty()) {
    entry["default"] = value;
  }
  put(what, entry);
}

void schema_writer::texts(key const& what, std::vector<std::string>& /*value*/,
                          text_rule const& rule) {
  put(what, {{"type", "array"}, {"minItems", 1}, {"items", matching(rule.pattern)}});
}

void schema_writer::named_texts(key const& what, std::map<std::string, std::string>& /*value*/,
                                text_rule const& names) {
  put(what, {{"type", "object"},
             {"propertyNames", {{"pattern", whole(names.pattern)}}},
             {"additionalProperties", {{"type", "string"}}}});
}

void schema_writer::bytes(key const& what, std::uint64_t& value,
                          limits<std::uint64_t> /*allowed*/) {
  auto entry = matching(bytes_pattern);
  entry["default"] = write_bytes(value);
  put(what, entry);
}

void schema_writer::bytes_or_auto(key const& what, std::optional<std::uint64_t>& value,
                                  limits<std::uint64_t> /*allowed*/) {
  auto entry = matching(fmt::format("auto|{}", bytes_pattern));
  entry["default"] = value ? write_bytes(*value) : "auto";
  put(what, entry);
}

void schema_writer::memory(key const& what, std::optional<memory_amount>& /*value*/,
                           limits<std::uint64_t> /*allowed*/) {
  auto entry = matching(fmt::format("auto|{}|{}", bytes_pattern, percentage_pattern));
  entry["default"] = "auto";
  put(what, entry);
}

void schema_writer::duration(key const& what, microseconds& value, limits<microseconds> allowed) {
  auto entry = matching(duration_pattern);
  if (value >= allowed.least) entry["default"] = write_duration(value);  // else there is none
  put(what, entry);
}

void schema_writer::duration_or_auto(key const& what, std::optional<microseconds>& value,
                                     limits<microseconds> /*allowed*/) {
  auto entry = matching(fmt::format("auto|{}", duration_pattern));
  entry["default"] = value ? write_duration(*value) : "auto";
  put(what, entry);
}

void schema_writer::percentage(key const& what, double& value, limits<double> /*allowed*/,
                               percent_sign sign) {
  auto entry = matching(percentage_pattern);
  if (sign == percent_sign::optional) {
    entry = {
        {"anyOf", json::array({entry, {{"type", "number"}, {"minimum", 1}, {"maximum", 100}}})}};
  }
  entry["default"] = write_percentage(value);
  put(what, entry);
}

void schema_writer::choice(key const& what, std::size_t& value,
                           std::span<std::string_view const> names) {
  put(what,
      {{"enum", std::vector<std::string>(names.begin(), names.end())}, {"default", names[value]}});
}

void schema_writer::section(key const& what, std::function<void(key_visitor&)> const& body) {
  schema_writer inner;
  body(inner);
  put(what, inner.object());
}

void schema_writer::list(key const& what, std::function<void(key_visitor&)> const& element) {
  schema_writer inner;
  element(inner);
  put(what, {{"type", "array"}, {"minItems", 1}, {"items", inner.object()}});
}

json schema_writer::object() const {
  json result{{"type", "object"}, {"additionalProperties", false}};
  if (!required_.empty()) {
    result["required"] = required_;
  }
  result["properties"] = properties_;
  return result;
}

}  // namespace detail

nlohmann::ordered_json schema() {
  detail::schema_writer writer;
  policy defaults;
  detail::describe(writer, defaults);
  nlohmann::ordered_json result{{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                                {"title", "Sluice policy"}};
  result.update(writer.object());
  return result;
}

}  // namespace sluice::policy
