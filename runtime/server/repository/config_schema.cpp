#include "runtime/server/repository/config_schema.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <vector>

#include "runtime/text/suggestion.hpp"

namespace sluice::server {
namespace {

namespace pb = google::protobuf;

/// A message type, and the fields that lead to it: "dynamic_batching.default_queue_policy".
struct reached_type {
  pb::Descriptor const* type;
  std::string path;
  int depth;
};

/// All types below a message, nearest first; none holds itself.
std::vector<reached_type> types_below(pb::Descriptor const& root) {
  std::vector<reached_type> found{{&root, "", 0}};
  for (std::size_t next = 0; next < found.size(); ++next) {
    auto const from = found[next];
    for (int i = 0; i < from.type->field_count(); ++i) {
      auto const* const field = from.type->field(i);
      if (field->message_type() != nullptr) {
        auto path = from.path.empty() ? field->name() : from.path + "." + field->name();
        found.push_back({field->message_type(), std::move(path), from.depth + 1});
      }
    }
  }
  return found;
}

std::string shown(reached_type const& type) {
  return type.path.empty() ? "a model configuration" : fmt::format("'{}'", type.path);
}

}  // namespace

std::string unknown_field(pb::Descriptor const& root, std::string_view type,
                          std::string_view field) {
  auto const types = types_below(root);
  auto const own = std::find_if(types.begin(), types.end(), [&](reached_type const& each) {
    return each.type->full_name() == type;
  });
  if (own == types.end()) {
    return fmt::format("there is no field '{}' here", field);
  }
  std::vector<std::string> places;
  int depth = 0;
  for (auto const& each : types) {
    if ((places.empty() || each.depth == depth) &&
        each.type->FindFieldByName(std::string{field}) != nullptr) {
      places.push_back(shown(each));
      depth = each.depth;
    }
  }
  std::vector<std::string_view> known;
  known.reserve(static_cast<std::size_t>(own->type->field_count()));
  for (int i = 0; i < own->type->field_count(); ++i)
    known.emplace_back(own->type->field(i)->name());
  return fmt::format("{} has no field '{}'; {}", shown(*own), field,
                     places.empty() ? text::suggestion(field, known)
                                    : fmt::format("it belongs to {}", fmt::join(places, " or ")));
}

std::string unknown_value(pb::Descriptor const& root, std::string_view value,
                          std::string_view field) {
  std::vector<std::string_view> known;
  for (auto const& each : types_below(root)) {
    auto const* const found = each.type->FindFieldByName(std::string{field});
    auto const* const values = found == nullptr ? nullptr : found->enum_type();
    for (int i = 0; values != nullptr && i < values->value_count(); ++i) {
      std::string_view const name{values->value(i)->name()};
      if (std::find(known.begin(), known.end(), name) == known.end() && name != "TYPE_INVALID") {
        known.push_back(name);
      }
    }
  }
  return fmt::format("'{}' cannot be '{}'; take one of {}", field, value, fmt::join(known, ", "));
}

}  // namespace sluice::server
