#include "runtime/server/repository/config_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "runtime/server/inference/datatypes.hpp"
#include "runtime/server/repository/config_schema.hpp"

namespace sluice::server {
namespace {

namespace pb = google::protobuf;

constexpr std::size_t longest_message = 300;  // what is wrong may be quoted, at any length
constexpr int max_depth = 64;
constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";  // which the parser does not take

/// What the parser has said first.
class first_error final : public pb::io::ErrorCollector {
 public:
  void AddError(int line, pb::io::ColumnNumber column, std::string const& message) override {
    if (!found) {
      found = {line, column, message};
    }
  }

  struct report {
    int line = 0;
    int column = 0;
    std::string message;
  };
  std::optional<report> found;
};

/// Where the parser means by its line and column, which count from 0, and a tab as up to 8 columns.
std::size_t offset_of(std::string_view text, int line, int column) {
  constexpr int tab = 8;
  std::size_t at = 0;
  for (; line > 0; --line) {
    auto const end = text.find('\n', at);
    if (end == std::string_view::npos) {
      return text.size();
    }
    at = end + 1;
  }
  for (int passed = 0; passed < column && at < text.size() && text[at] != '\n'; ++at) {
    passed += text[at] == '\t' ? tab - passed % tab : 1;
  }
  return at;
}

text_position position_at(std::string_view text, std::size_t offset) {
  auto const before = text.substr(0, offset);
  auto const line_start = before.rfind('\n');  // none: npos, which wraps to the first column
  return {1 + static_cast<std::size_t>(std::count(before.begin(), before.end(), '\n')),
          before.size() - line_start};
}

error text_error(std::string const& file, text_position where, std::string_view message,
                 error_kind kind) {
  return {kind, fmt::format("{}:{}:{}: {}", file, where.line, where.column, message)};
}

std::vector<std::string> quoted_words(std::string_view message) {
  std::vector<std::string> words;
  for (std::size_t at = 0; (at = message.find('"', at)) != std::string_view::npos;) {
    auto const end = message.find('"', at + 1);
    if (end == std::string_view::npos) {
      break;
    }
    words.emplace_back(message.substr(at + 1, end - at - 1));
    at = end + 1;
  }
  return words;
}

/// The parser has passed the word that it complains of: the place of the word, if it stands there.
std::size_t step_back(std::string_view text, std::size_t offset,
                      std::vector<std::string> const& words) {
  auto const end = text.substr(0, offset).find_last_not_of(" \t\r\n");
  if (end == std::string_view::npos) {
    return offset;
  }
  auto const before = text.substr(0, end + 1);
  for (auto const& word : words) {
    if (!word.empty() && before.ends_with(word)) {
      return before.size() - word.size();
    }
  }
  return offset;
}

bool is_at_end(std::string_view text, std::size_t offset) {
  while (offset < text.size()) {
    if (text[offset] == '#') {
      offset = std::min(text.find('\n', offset), text.size());
    } else if (std::string_view{" \t\r\n\v\f"}.find(text[offset]) == std::string_view::npos) {
      return false;
    } else {
      ++offset;
    }
  }
  return true;
}

std::string shortened(std::string message) {
  if (message.size() > longest_message) {
    auto end = longest_message;
    while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0U) == 0x80U) --end;
    message = message.substr(0, end) + "…";
  }
  return message;
}

/// The parser's complaint in terms of what may stand in the file.
std::string explained(std::string const& message, std::vector<std::string> const& words,
                      bool at_end, pb::Descriptor const& root) {
  if (at_end && message.starts_with("Expected")) {
    return "the file ends here, though a message or a list is never closed, or a value is missing";
  }
  if (message.find("has no field named") != std::string::npos && words.size() == 2) {
    return unknown_field(root, words[0], words[1]);
  }
  if (message.starts_with("Unknown enumeration value") && words.size() == 2) {
    return unknown_value(root, words[0], words[1]);
  }
  if (message.find("specified multiple times") != std::string::npos && words.size() == 1) {
    return fmt::format("'{}' is given a second time", words[0]);
  }
  if (message.find("another member of oneof") != std::string::npos && words.size() == 3) {
    return fmt::format("'{}' cannot stand beside '{}'; take one of them", words[0], words[1]);
  }
  return shortened(message) +
         (message.starts_with("Expected string") ? "; a string stands in quotes" : "");
}

void check_strings(pb::Message const& message, field_places const& at) {
  auto const& reflection = *message.GetReflection();
  std::vector<pb::FieldDescriptor const*> present;
  reflection.ListFields(message, &present);
  for (auto const* const field : present) {
    auto const is_message = field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE;
    if (!is_message && field->cpp_type() != pb::FieldDescriptor::CPPTYPE_STRING) {
      continue;
    }
    int const count = field->is_repeated() ? reflection.FieldSize(message, field) : 1;
    for (int i = 0; i < count; ++i) {
      if (is_message) {
        check_strings(field->is_repeated() ? reflection.GetRepeatedMessage(message, field, i)
                                           : reflection.GetMessage(message, field),
                      at.within(field->number(), i));
      } else if (!is_utf8(field->is_repeated() ? reflection.GetRepeatedString(message, field, i)
                                               : reflection.GetString(message, field))) {
        at.fail_at(at.of(field->number(), i),
                   fmt::format("'{}' is not UTF-8; write other characters in UTF-8, or as \\u00e9",
                               field->name()));
      }
    }
  }
}

}  // namespace

config_text::config_text(std::string_view text, std::string const& file, pb::Message& into)
    : text_(text.substr(text.starts_with(byte_order_mark) ? byte_order_mark.size() : 0)),
      file_(&file),
      message_(&into) {
  first_error errors;
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  parser.WriteLocationsTo(&places_);
  parser.SetRecursionLimit(max_depth);
  parser.AllowPartialMessage(true);  // it takes an entry of a map without a value for one
  pb::io::ArrayInputStream stream{text_.data(), static_cast<int>(text_.size())};
  if (!parser.Parse(&stream, &into)) {
    auto const said = errors.found.value_or(first_error::report{0, 0, "is not understood"});
    auto const words = quoted_words(said.message);
    auto const offset = offset_of(text_, said.line, said.column);
    throw text_error(
        file, position_at(text_, step_back(text_, offset, words)),
        explained(said.message, words, is_at_end(text_, offset), *into.GetDescriptor()),
        error_kind::invalid_argument);
  }
  check_strings(into, places());
}

field_places::field_places(config_text const& file, pb::Message const& message, tree const* places,
                           text_position own)
    : file_(&file), message_(&message), places_(places), own_(own) {}

pb::FieldDescriptor const* field_places::descriptor(int field) const {
  return message_->GetDescriptor()->FindFieldByNumber(field);
}

int field_places::mention_count(int field) const {
  auto const* const of = descriptor(field);
  if (places_ == nullptr) {
    return 0;
  }
  if (!of->is_repeated()) {
    return places_->GetLocation(of, -1).line < 0 ? 0 : 1;
  }
  int count = 0;
  while (places_->GetLocation(of, count).line >= 0) ++count;
  return count;
}

text_position field_places::mention(int field, int index) const {
  auto const* const of = descriptor(field);
  if (places_ == nullptr) {
    return own_;
  }
  auto const found = places_->GetLocation(of, of->is_repeated() ? index : -1);
  return found.line < 0
             ? own_
             : position_at(file_->text_, offset_of(file_->text_, found.line, found.column));
}

text_position field_places::of(int field, int index) const {
  auto const* const what = descriptor(field);
  if (!what->is_repeated() ||
      mention_count(field) == message_->GetReflection()->FieldSize(*message_, what)) {
    return mention(field, index);
  }
  return mention(field);
}

field_places field_places::within(int field, int index) const {
  auto const* const what = descriptor(field);
  auto const& reflection = *message_->GetReflection();
  auto const& value = what->is_repeated() ? reflection.GetRepeatedMessage(*message_, what, index)
                                          : reflection.GetMessage(*message_, what);
  auto const* const nested =
      places_ == nullptr ? nullptr
                         : places_->GetTreeForNested(what, what->is_repeated() ? index : -1);
  field_places const there{*file_, value, nested, of(field, index)};
  if (!what->is_repeated() || mention_count(field) == reflection.FieldSize(*message_, what)) {
    return there;
  }
  // In a list: where its first field stands.
  auto first = std::optional<text_position>{};
  for (int i = 0; i < value.GetDescriptor()->field_count(); ++i) {
    int const number = value.GetDescriptor()->field(i)->number();
    if (!there.mentions(number)) {
      continue;
    }
    auto const place = there.mention(number);
    if (!first || std::pair{place.line, place.column} < std::pair{first->line, first->column}) {
      first = place;
    }
  }
  return {*file_, value, nested, first.value_or(there.own())};
}

field_places field_places::within_key(int field, std::string_view key) const {
  auto const* const map = descriptor(field);
  auto const& reflection = *message_->GetReflection();
  auto const* const key_field = map->message_type()->map_key();
  bool const is_text = key_field->cpp_type() == pb::FieldDescriptor::CPPTYPE_STRING;
  int found = 0;  // the last of them counts
  for (int i = 0; i < reflection.FieldSize(*message_, map); ++i) {
    auto const& entry = reflection.GetRepeatedMessage(*message_, map, i);
    auto const& its = *entry.GetReflection();
    if ((is_text ? its.GetString(entry, key_field)
                 : std::to_string(its.GetUInt64(entry, key_field))) == key) {
      found = i;
    }
  }
  return within(field, found).within(map->message_type()->map_value()->number());
}

void field_places::fail(std::string_view message, error_kind kind) const {
  fail_at(own_, message, kind);
}

void field_places::fail(int field, std::string_view message, error_kind kind) const {
  fail_at(mention(field), message, kind);
}

void field_places::fail_at(text_position where, std::string_view message, error_kind kind) const {
  throw text_error(*file_->file_, where, message, kind);
}

}  // namespace sluice::server
