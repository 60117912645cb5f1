#include "runtime/server/http/named_body.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/beast/core/string.hpp>
#include <boost/json/basic_parser_impl.hpp>
#include <cstdint>
#include <optional>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/json_events.hpp"

namespace sluice::server {

namespace json = boost::json;

namespace {

constexpr std::string_view key_of_model{"model"};

[[noreturn]] void refuse(std::string const& why) {
  throw error{error_kind::invalid_argument, why};
}

json::parse_options options() {
  json::parse_options made;
  made.max_depth = deepest_body;
  return made;
}

}  // namespace

/// The events of Boost.JSON's parser, by the names that it has for them. A fault is thrown: the parser is not asked again.
class named_body::handler : public json_events {
 public:
  [[nodiscard]] std::optional<std::string> const& model() const { return model_; }

  bool on_object_begin(error_code& /*failure*/) {
    begin_value(true);
    ++depth_;
    return true;
  }
  bool on_object_end(std::size_t /*members*/, error_code& /*failure*/) {
    --depth_;
    return true;
  }
  bool on_array_begin(error_code& /*failure*/) {
    begin_value(false);
    ++depth_;
    return true;
  }
  bool on_array_end(std::size_t /*elements*/, error_code& /*failure*/) {
    --depth_;
    return true;
  }
  bool on_key_part(text part, std::size_t /*so_far*/, error_code& /*failure*/) {
    if (depth_ == 1) append(key_, part, key_of_model.size() + 1);
    return true;
  }
  bool on_key(text part, std::size_t size, error_code& failure) {
    if (depth_ != 1) return true;
    (void)on_key_part(part, size, failure);
    auto const key = std::exchange(key_, {});
    names_model_ = key == key_of_model;
    if (!names_model_ && boost::beast::iequals(key, "model")) {
      refuse(
          fmt::format("the body has the key '{}', which some would take for 'model'; write "
                      "'model'",
                      key));
    }
    if (names_model_ && model_) refuse("the body has 'model' twice; keep one of them");
    return true;
  }
  bool on_string_part(text part, std::size_t /*so_far*/, error_code& /*failure*/) {
    begin_string();
    if (names_model_ && depth_ == 1) append(value_, part, longest_model_name + 1);
    return true;
  }
  bool on_string(text part, std::size_t size, error_code& failure) {
    (void)on_string_part(part, size, failure);
    if (names_model_ && depth_ == 1) {
      model_ = std::exchange(value_, {});
      names_model_ = false;
    }
    return true;
  }
  bool on_number_part(text /*part*/, error_code& /*failure*/) {
    begin_value(false);
    return true;
  }
  bool on_int64(std::int64_t /*value*/, text /*part*/, error_code& /*failure*/) {
    begin_value(false);
    return true;
  }
  bool on_uint64(std::uint64_t /*value*/, text /*part*/, error_code& /*failure*/) {
    begin_value(false);
    return true;
  }
  bool on_double(double /*value*/, text /*part*/, error_code& /*failure*/) {
    begin_value(false);
    return true;
  }
  bool on_bool(bool /*value*/, error_code& /*failure*/) {
    begin_value(false);
    return true;
  }
  bool on_null(error_code& /*failure*/) {
    begin_value(false);
    return true;
  }

 private:
  /// Of anything but a string.
  void begin_value(bool is_object) const {
    if (depth_ == 0 && !is_object) refuse("the body is not a JSON object");
    if (depth_ == 1 && names_model_) refuse("'model' in the body must be a string");
  }
  void begin_string() const {
    if (depth_ == 0) refuse("the body is not a JSON object");
  }
  /// Of a longer text only that it is longer.
  static void append(std::string& to, text part, std::size_t most) {
    to.append(part.data(), std::min(part.size(), most - to.size()));
  }

  std::size_t depth_ = 0;
  std::string key_;
  std::string value_;
  bool names_model_ = false;  ///< the key of the outermost object whose value comes
  std::optional<std::string> model_;
};

struct named_body::reading {
  json::basic_parser<handler> parser{options()};
  std::uint64_t bytes = 0;

  void take(bool has_more, std::string_view piece) {
    boost::system::error_code failure;
    auto const used = parser.write_some(has_more, piece.data(), piece.size(), failure);
    bytes += used;
    if (failure == json::error::too_deep) {
      refuse(fmt::format("the body nests deeper than {} levels", deepest_body));
    }
    if (failure == json::error::incomplete) {
      refuse(bytes == 0 ? "the body is empty" : "the body ends before its JSON does");
    }
    if (failure) {
      refuse(fmt::format("the body is not JSON: {}, within its first {} bytes", failure.message(),
                         bytes));
    }
    if (used < piece.size()) {
      refuse(
          fmt::format("something stands behind the body's JSON, which ends after {} bytes", bytes));
    }
  }
};

named_body::named_body() : reading_(std::make_unique<reading>()) {}
named_body::~named_body() = default;
named_body::named_body(named_body&&) noexcept = default;
named_body& named_body::operator=(named_body&&) noexcept = default;

void named_body::take(std::string_view piece) {
  if (piece.empty()) return;
  if (reading_->bytes == 0 && piece.front() == '\xef') {
    refuse("the body begins with a byte order mark, which JSON does not have; leave it out");
  }
  reading_->take(true, piece);
}

void named_body::finish() {
  reading_->take(false, {});
  if (model() == nullptr) refuse("the body names no model; add \"model\": with the name of one");
}

std::string const* named_body::model() const noexcept {
  auto const& found = reading_->parser.handler().model();
  return found ? &*found : nullptr;
}

}  // namespace sluice::server
