#include "runtime/server/repository/text_format.hpp"

#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <utility>

#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

constexpr int max_depth = 64;

// <cctype> depends on the locale and is undefined for negative chars.
constexpr bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
constexpr bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
constexpr bool is_word(char c) {
  return is_letter(c) || is_digit(c);
}

constexpr int digit_value(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return 16;
}

std::string lower(std::string_view text) {
  std::string result{text};
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

void append_utf8(std::string& out, std::uint32_t code) {
  auto const put = [&out](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0U | (code >> 6U));
    put(0x80U | (code & 0x3FU));
  } else if (code < 0x10000) {
    put(0xE0U | (code >> 12U));
    put(0x80U | ((code >> 6U) & 0x3FU));
    put(0x80U | (code & 0x3FU));
  } else {
    put(0xF0U | (code >> 18U));
    put(0x80U | ((code >> 12U) & 0x3FU));
    put(0x80U | ((code >> 6U) & 0x3FU));
    put(0x80U | (code & 0x3FU));
  }
}

class tree_reader {
 public:
  tree_reader(std::string_view text, std::string const& file) : text_(text), file_(file) {}

  text_value document() {
    text_value root;
    skip_blank();
    root.where = here();
    message_body(root, '\0', root.where);
    return root;
  }

 private:
  [[nodiscard]] bool at_end() const { return at_ >= text_.size(); }
  [[nodiscard]] char peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }
  [[nodiscard]] text_position here() const { return {line_, at_ - line_start_ + 1}; }

  void advance() {
    if (text_[at_] == '\n') {
      ++line_;
      line_start_ = at_ + 1;
    }
    ++at_;
  }

  void skip_blank() {
    while (!at_end()) {
      char const c = text_[at_];
      if (c == '#') {
        while (!at_end() && text_[at_] != '\n') advance();
      } else if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\v' || c == '\f') {
        advance();
      } else {
        return;
      }
    }
  }

  bool take(char c) {
    if (at_end() || text_[at_] != c) return false;
    advance();
    skip_blank();
    return true;
  }

  [[noreturn]] void fail(text_position where, std::string_view message) const {
    throw text_error(file_, where, message);
  }

  /// What stands here, for a message.
  [[nodiscard]] std::string found() const {
    if (at_end()) return "the end of the file";
    auto const c = static_cast<unsigned char>(text_[at_]);
    if (c < 0x20 || c >= 0x7F) return fmt::format("byte 0x{:02x}", c);
    return fmt::format("'{}'", text_[at_]);
  }

  std::string word() {
    std::string result;
    while (is_word(peek())) {
      result.push_back(peek());
      advance();
    }
    return result;
  }

  void message_body(text_value& message, char closing, text_position opened) {
    while (true) {
      if (at_end()) {
        if (closing == '\0') return;
        fail(opened, fmt::format("this message is never closed; it needs a '{}'", closing));
      }
      if (closing != '\0' && take(closing)) return;
      message.fields.push_back(field());
      if (!take(',')) take(';');
    }
  }

  text_field field() {
    text_field result;
    result.where = here();
    result.name = field_name();
    skip_blank();
    bool const colon = take(':');
    if (peek() == '[') {
      list(result, colon);
    } else {
      result.values.push_back(value(result.name, colon));
    }
    return result;
  }

  std::string field_name() {
    if (is_letter(peek())) return word();
    if (peek() != '[') fail(here(), fmt::format("expected the name of a field, found {}", found()));
    auto const opened = here();
    std::string name{"["};
    advance();
    while (is_word(peek()) || peek() == '.' || peek() == '/' || peek() == '-') {
      name.push_back(peek());
      advance();
    }
    if (peek() != ']' || name.size() == 1) {
      fail(opened, "expected an extension's name, as in [a.b]");
    }
    advance();
    return name + ']';
  }

  void list(text_field& field, bool colon) {
    field.list = true;
    auto const opened = here();
    take('[');
    if (take(']')) return;
    while (true) {
      if (at_end()) fail(opened, "this list is never closed; it needs a ']'");
      field.values.push_back(value(field.name, colon));
      if (take(']')) return;
      if (!take(',')) {
        if (at_end()) fail(opened, "this list is never closed; it needs a ']'");
        fail(here(), fmt::format("expected ',' or ']' in the list, found {}", found()));
      }
    }
  }

  text_value value(std::string const& name, bool colon) {
    text_value result;
    result.where = here();
    char const c = peek();
    if (c == '{' || c == '<') {
      if (++depth_ > max_depth) {
        fail(here(), fmt::format("messages nest deeper than {}", max_depth));
      }
      take(c);
      message_body(result, c == '{' ? '}' : '>', result.where);
      --depth_;
      return result;
    }
    if (!colon) {
      fail(here(), fmt::format("expected ':' or '{{' after '{}', found {}", name, found()));
    }
    if (c == '"' || c == '\'') {
      string(result);
    } else if (is_letter(c)) {
      result.kind = text_value::kind_t::identifier;
      result.text = word();
    } else if (is_digit(c) || c == '.' || c == '-') {
      number(result);
    } else {
      fail(here(), fmt::format("expected a value for '{}', found {}", name, found()));
    }
    skip_blank();
    return result;
  }

  void string(text_value& result) {
    result.kind = text_value::kind_t::string;
    while (peek() == '"' || peek() == '\'') {  // adjacent literals are one string
      auto const opened = here();
      char const quote = peek();
      advance();
      while (true) {
        if (at_end() || peek() == '\n') {
          fail(opened, "this string is not closed on its line");
        }
        char const c = peek();
        if (c == quote) break;
        if (c == '\\') {
          escape(result.text);
        } else {
          result.text.push_back(c);
          advance();
        }
      }
      advance();
      skip_blank();
    }
    if (!is_utf8(result.text)) fail(result.where, "this string is not UTF-8");
  }

  void escape(std::string& out) {
    auto const where = here();
    advance();
    char const c = peek();
    if (c >= '0' && c <= '7') {
      std::uint32_t const code = digits(8, 3);
      if (code > 0xFF) fail(where, "an octal escape is at most \\377");
      out.push_back(static_cast<char>(code));
      return;
    }
    constexpr std::string_view letters{"abfnrtv?\\'\""};
    constexpr std::string_view meanings{"\a\b\f\n\r\t\v?\\'\""};
    if (auto const i = letters.find(c); !at_end() && i != std::string_view::npos) {
      out.push_back(meanings[i]);
      advance();
      return;
    }
    if (c == 'x' || c == 'X') {
      advance();
      if (digit_value(peek()) >= 16) fail(where, "\\x needs a hexadecimal digit");
      out.push_back(static_cast<char>(digits(16, 2)));
      return;
    }
    if (c == 'u' || c == 'U') {
      advance();
      int const wanted = c == 'u' ? 4 : 8;
      auto const start = at_;
      std::uint32_t const code = digits(16, wanted);
      if (at_ - start != static_cast<std::size_t>(wanted) || code > 0x10FFFF ||
          (code >= 0xD800 && code <= 0xDFFF)) {
        fail(where,
             fmt::format("\\{} needs {} hexadecimal digits that name a character", c, wanted));
      }
      append_utf8(out, code);
      return;
    }
    fail(where, "no such escape; write \\\\ for a backslash");
  }

  std::uint32_t digits(int base, int most) {
    std::uint32_t code = 0;
    for (int i = 0; i < most && digit_value(peek()) < base; ++i) {
      code =
          code * static_cast<std::uint32_t>(base) + static_cast<std::uint32_t>(digit_value(peek()));
      advance();
    }
    return code;
  }

  void number(text_value& result) {
    if (peek() == '-') {
      result.negative = true;
      advance();
      skip_blank();
    }
    if (is_letter(peek())) return special_real(result);
    std::string literal;
    while (is_word(peek()) || peek() == '.' ||
           ((peek() == '+' || peek() == '-') &&
            (literal.ends_with('e') || literal.ends_with('E')) && !literal.starts_with("0x") &&
            !literal.starts_with("0X"))) {
      literal.push_back(peek());
      advance();
    }
    if (!integer(result, literal) && !real(result, literal)) {
      fail(result.where, fmt::format("'{}' is not a number", literal));
    }
  }

  void special_real(text_value& result) {
    auto const name = lower(word());
    result.kind = text_value::kind_t::real;
    if (name == "inf" || name == "infinity") {
      result.real = -std::numeric_limits<double>::infinity();
    } else if (name == "nan") {
      result.real = std::numeric_limits<double>::quiet_NaN();
    } else {
      fail(result.where, fmt::format("expected a number after '-', found '{}'", name));
    }
  }

  /// False when `literal` is no integer at all; fails when it is one that 64 bits cannot hold.
  bool integer(text_value& result, std::string const& literal) const {
    int base = 10;
    std::string_view body{literal};
    if (body.starts_with("0x") || body.starts_with("0X")) {
      base = 16;
      body.remove_prefix(2);
    } else if (body.size() > 1 && body.front() == '0') {
      base = 8;
      body.remove_prefix(1);
    }
    auto const [end, status] =
        std::from_chars(body.data(), body.data() + body.size(), result.magnitude, base);
    if (end != body.data() + body.size() || body.empty() || status == std::errc::invalid_argument) {
      return false;
    }
    if (status == std::errc::result_out_of_range ||
        (result.negative && result.magnitude > std::uint64_t{1} << 63U)) {
      fail(result.where, fmt::format("'{}' does not fit 64 bits", literal));
    }
    result.kind = text_value::kind_t::integer;
    return true;
  }

  static bool real(text_value& result, std::string literal) {
    if (literal.find_first_of(".eEfF") == std::string::npos) return false;  // "08", a broken octal
    if (literal.ends_with('f') || literal.ends_with('F')) literal.pop_back();
    double magnitude = 0;
    auto const [end, status] =
        std::from_chars(literal.data(), literal.data() + literal.size(), magnitude);
    if (end != literal.data() + literal.size() || literal.empty()) return false;
    if (status != std::errc{}) return false;
    result.kind = text_value::kind_t::real;
    result.real = result.negative ? -magnitude : magnitude;
    return true;
  }

  std::string_view text_;
  std::string const& file_;
  std::size_t at_ = 0;
  std::size_t line_ = 1;
  std::size_t line_start_ = 0;
  int depth_ = 0;
};

}  // namespace

error text_error(std::string const& file, text_position where, std::string_view message,
                 error_kind kind) {
  return {kind, fmt::format("{}:{}:{}: {}", file, where.line, where.column, message)};
}

text_value parse_text_format(std::string_view text, std::string const& file) {
  constexpr std::string_view byte_order_mark{"\xEF\xBB\xBF"};
  if (text.starts_with(byte_order_mark)) text.remove_prefix(byte_order_mark.size());
  return tree_reader{text, file}.document();
}

}  // namespace sluice::server
