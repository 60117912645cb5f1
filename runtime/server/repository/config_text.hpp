/// A file in protobuf's text format, read into a message, and the places at which its fields stand:
/// what finds a fault in the message says it at its place.
///
/// Lines and columns count from 1, columns in bytes. Strings must be UTF-8, since they become JSON.
///
/// Source: protobuf.dev/reference/protobuf/textformat-spec.
#pragma once

#include <google/protobuf/text_format.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "memhandover/base/error.hpp"

namespace sluice::server {

struct text_position {
  std::size_t line = 1;
  std::size_t column = 1;
};

class config_text;

/// The places of a message's fields, which are named by their numbers. A value in a list `[ … ]`
/// has the place of the list, or of its own first field.
class field_places {
 public:
  using tree = google::protobuf::TextFormat::ParseInfoTree;

  field_places(config_text const& file, google::protobuf::Message const& message,
               tree const* places, text_position own);

  [[nodiscard]] bool mentions(int field) const { return mention_count(field) > 0; }
  [[nodiscard]] int mention_count(int field) const;
  /// Of one mention, or of the message itself.
  [[nodiscard]] text_position mention(int field, int index = 0) const;
  /// Of one value, or of the message itself where the field is not mentioned.
  [[nodiscard]] text_position of(int field, int index = 0) const;
  [[nodiscard]] text_position own() const noexcept { return own_; }
  /// The places within the message that is the value of a field.
  [[nodiscard]] field_places within(int field, int index = 0) const;
  /// The same of a map that holds messages, for a key that it has.
  [[nodiscard]] field_places within_key(int field, std::string_view key) const;

  [[noreturn]] void fail(std::string_view message,
                         error_kind kind = error_kind::invalid_argument) const;
  [[noreturn]] void fail(int field, std::string_view message,
                         error_kind kind = error_kind::invalid_argument) const;
  [[noreturn]] void fail_at(text_position where, std::string_view message,
                            error_kind kind = error_kind::invalid_argument) const;

 private:
  [[nodiscard]] google::protobuf::FieldDescriptor const* descriptor(int field) const;

  config_text const* file_;
  google::protobuf::Message const* message_;
  tree const* places_;
  text_position own_;
};

class config_text {
 public:
  /// `file` is only a name for messages. Throws `invalid_argument`: "config.pbtxt:3:9: what is
  /// wrong". All three must outlive this.
  config_text(std::string_view text, std::string const& file, google::protobuf::Message& into);

  [[nodiscard]] field_places places() const { return {*this, *message_, &places_, {}}; }

 private:
  friend class field_places;

  std::string_view text_;
  std::string const* file_;
  google::protobuf::Message const* message_;
  field_places::tree places_;
};

}  // namespace sluice::server
