#include "runtime/server/repository/config_json.hpp"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cmath>
#include <string>

namespace sluice::server {
namespace {

namespace pb = google::protobuf;
using nlohmann::json;

/// JSON has no such numbers; protobuf writes them as strings.
json real(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

json enumerator(pb::FieldDescriptor const& field, int number) {
  auto const* const value = field.enum_type()->FindValueByNumber(number);
  return value == nullptr ? json(number) : json(value->name());
}

/// One value of a repeated field, or the value of another.
json value_of(pb::Message const& message, pb::FieldDescriptor const* field, int index) {
  auto const& from = *message.GetReflection();
  bool const many = field->is_repeated();
  switch (field->cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_INT32:
      return many ? from.GetRepeatedInt32(message, field, index) : from.GetInt32(message, field);
    case pb::FieldDescriptor::CPPTYPE_INT64:
      return many ? from.GetRepeatedInt64(message, field, index) : from.GetInt64(message, field);
    case pb::FieldDescriptor::CPPTYPE_UINT32:
      return many ? from.GetRepeatedUInt32(message, field, index) : from.GetUInt32(message, field);
    case pb::FieldDescriptor::CPPTYPE_UINT64:
      return many ? from.GetRepeatedUInt64(message, field, index) : from.GetUInt64(message, field);
    case pb::FieldDescriptor::CPPTYPE_DOUBLE:
      return real(many ? from.GetRepeatedDouble(message, field, index)
                       : from.GetDouble(message, field));
    case pb::FieldDescriptor::CPPTYPE_FLOAT:
      return real(many ? from.GetRepeatedFloat(message, field, index)
                       : from.GetFloat(message, field));
    case pb::FieldDescriptor::CPPTYPE_BOOL:
      return many ? from.GetRepeatedBool(message, field, index) : from.GetBool(message, field);
    case pb::FieldDescriptor::CPPTYPE_ENUM:
      return enumerator(*field, many ? from.GetRepeatedEnumValue(message, field, index)
                                     : from.GetEnumValue(message, field));
    case pb::FieldDescriptor::CPPTYPE_STRING:
      return many ? from.GetRepeatedString(message, field, index) : from.GetString(message, field);
    case pb::FieldDescriptor::CPPTYPE_MESSAGE:
      return config_to_json(many ? from.GetRepeatedMessage(message, field, index)
                                 : from.GetMessage(message, field));
  }
  return nullptr;
}

json values_of(pb::Message const& message, pb::FieldDescriptor const* field) {
  int const count = message.GetReflection()->FieldSize(message, field);
  auto result = field->is_map() ? json::object() : json::array();
  for (int i = 0; i < count; ++i) {
    if (!field->is_map()) {
      result.push_back(value_of(message, field, i));
      continue;
    }
    auto const& entry = message.GetReflection()->GetRepeatedMessage(message, field, i);
    auto const key = value_of(entry, field->message_type()->map_key(), 0);
    result[key.is_string() ? key.get<std::string>() : key.dump()] =
        value_of(entry, field->message_type()->map_value(), 0);
  }
  return result;
}

}  // namespace

json config_to_json(pb::Message const& message) {
  auto result = json::object();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    auto const* const field = message.GetDescriptor()->field(i);
    if (field->is_repeated()) {
      result[field->name()] = values_of(message, field);
    } else if (!field->has_presence() || message.GetReflection()->HasField(message, field)) {
      result[field->name()] = value_of(message, field, 0);
    }
  }
  return result;
}

}  // namespace sluice::server
