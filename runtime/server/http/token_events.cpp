#include "runtime/server/http/token_events.hpp"

#include <algorithm>
#include <array>
#include <boost/json/basic_parser_impl.hpp>
#include <cstdint>
#include <string>

#include "runtime/server/http/json_events.hpp"

namespace sluice::server {

namespace json = boost::json;

/// The events of Boost.JSON's parser, by the names that it has for them: whether there is a token.
///
///   {"choices": [{"text": "…"}]}    {"choices": [{"delta": {"content": "…", "tool_calls": […]}}]}    {"delta": "…"}
///    1            3                               3        4
class token_events::handler : public json_events {
 public:
  [[nodiscard]] bool has_token() const { return has_token_; }
  void reset() { *this = {}; }

  bool on_object_begin(error_code& /*failure*/) { return deeper(); }
  bool on_object_end(std::size_t /*members*/, error_code& /*failure*/) { return higher(); }
  bool on_array_begin(error_code& /*failure*/) { return deeper(); }
  bool on_array_end(std::size_t /*elements*/, error_code& /*failure*/) { return higher(); }
  bool on_key_part(text part, std::size_t /*so_far*/, error_code& /*failure*/) {
    next_key_.append(part.data(), std::min(part.size(), longest_key - next_key_.size()));
    return true;
  }
  bool on_key(text part, std::size_t size, error_code& failure) {
    (void)on_key_part(part, size, failure);
    if (depth_ < keys_.size()) keys_.at(depth_) = next_key_;
    next_key_.clear();
    return true;
  }
  bool on_string_part(text part, std::size_t /*so_far*/, error_code& /*failure*/) {
    has_token_ = has_token_ || (!part.empty() && is_of_token());
    return true;
  }
  bool on_string(text part, std::size_t size, error_code& failure) {
    return on_string_part(part, size, failure);
  }
  static bool on_number_part(text /*part*/, error_code& /*failure*/) { return true; }
  static bool on_int64(std::int64_t /*value*/, text /*part*/, error_code& /*failure*/) {
    return true;
  }
  static bool on_uint64(std::uint64_t /*value*/, text /*part*/, error_code& /*failure*/) {
    return true;
  }
  static bool on_double(double /*value*/, text /*part*/, error_code& /*failure*/) { return true; }
  static bool on_bool(bool /*value*/, error_code& /*failure*/) { return true; }
  static bool on_null(error_code& /*failure*/) { return true; }

 private:
  static constexpr std::size_t longest_key = 16;

  bool deeper() {
    ++depth_;
    if (depth_ < keys_.size()) keys_.at(depth_).clear();
    return true;
  }
  bool higher() {
    --depth_;
    return true;
  }
  /// Whether a text here is what a model has said.
  [[nodiscard]] bool is_of_token() const {
    if (depth_ == 1) return keys_[1] == "delta";
    if (depth_ < 3 || keys_[1] != "choices") return false;
    if (depth_ == 3) return keys_[3] == "text";
    return keys_[3] == "delta" && keys_[4] != "role";
  }

  std::size_t depth_ = 0;
  std::array<std::string, 5> keys_;  ///< by depth, of the value that is being read
  std::string next_key_;
  bool has_token_ = false;
};

struct token_events::reading {
  json::basic_parser<handler> parser{json::parse_options{}};
  std::string name;          ///< of the field whose line is being read, as far as it matters
  bool is_in_value = false;  ///< behind the colon
  bool is_at_value = false;  ///< right behind it, where a blank belongs to nobody
  bool is_data = false;
  bool has_data = false;       ///< of this event
  bool is_broken = false;      ///< its data are not JSON
  bool is_within = false;      ///< something of an event has come, and not its end
  bool may_be_second = false;  ///< a line feed that comes now belongs to the line's end before it

  [[nodiscard]] bool end_line() {
    bool const is_blank = name.empty() && !is_in_value;
    name.clear();
    is_in_value = is_at_value = is_data = false;
    is_within = !is_blank;
    if (!is_blank) return false;
    bool const has_token = has_data && !is_broken && parser.handler().has_token();
    if (has_data) {
      parser.reset();
      parser.handler().reset();
    }
    has_data = is_broken = false;
    return has_token;
  }
  void add(std::string_view value) {
    if (is_at_value && value.starts_with(' ')) value.remove_prefix(1);
    is_at_value = false;
    if (!is_data || is_broken || value.empty()) return;
    has_data = true;
    boost::system::error_code failure;
    is_broken = parser.write_some(true, value.data(), value.size(), failure) < value.size() ||
                failure.failed();
  }
};

token_events::token_events() : reading_(std::make_unique<reading>()) {}
token_events::~token_events() = default;
token_events::token_events(token_events&&) noexcept = default;
token_events& token_events::operator=(token_events&&) noexcept = default;

bool token_events::is_between_events() const {
  return !reading_->is_within;
}

std::size_t token_events::take(std::string_view piece) {
  constexpr std::string_view ends{"\r\n"}, name_of_data{"data"};
  std::size_t found = 0;
  auto& now = *reading_;
  while (!piece.empty()) {
    auto const first = piece.front();
    bool const is_end = ends.find(first) != std::string_view::npos;
    if (is_end) {
      if (!(first == '\n' && std::exchange(now.may_be_second, false)) && now.end_line()) ++found;
      now.may_be_second = first == '\r';
      piece.remove_prefix(1);
      continue;
    }
    now.may_be_second = false;
    now.is_within = true;
    if (!now.is_in_value) {
      piece.remove_prefix(1);
      if (first == ':') {
        now.is_in_value = now.is_at_value = true;
        now.is_data = now.name == name_of_data;
      } else if (now.name.size() <= name_of_data.size()) {
        now.name += first;
      }
      continue;
    }
    auto const value = piece.substr(0, piece.find_first_of(ends));
    now.add(value);
    piece.remove_prefix(value.size());
  }
  return found;
}

}  // namespace sluice::server
