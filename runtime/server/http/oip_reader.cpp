#include "runtime/server/http/oip_reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;

constexpr std::size_t max_depth = 64;
// A short text must not become many times its size in memory.
constexpr std::size_t max_tensors = 1024;
constexpr std::size_t max_keys = 256;

/// What an open object or list is.
enum class place {
  request,
  request_parameters,
  inputs,
  input,
  outputs,
  output,
  tensor_parameters,
  shape,
  data,
  ignored,
};

/// The events of nlohmann::json's SAX parser; each returns true, faults are thrown.
class request_handler {
 public:
  using number_integer_t = json::number_integer_t;
  using number_unsigned_t = json::number_unsigned_t;
  using number_float_t = json::number_float_t;
  using string_t = json::string_t;
  using binary_t = json::binary_t;

  explicit request_handler(json_document document)
      : next_(document.text.data()), end_(next_ + document.text.size()) {
    request_.document = std::move(document);
  }

  raw_request take() { return std::move(request_); }

  /// The text as the parser reads it: byte by byte, but for lists of data, of which it sees the
  /// brackets alone. It does not look ahead of the bracket that opens a list.
  class text_iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = char const*;
    using reference = char const&;

    explicit text_iterator(request_handler* of) : of_(of) {}

    reference operator*() const {
      // The parser takes a zero byte for the end, and would not look at what is behind it.
      if (*of_->next_ == '\0') {
        of_->request_.document.not_json(of_->next_, "it holds a byte of zero");
      }
      return *of_->next_;
    }
    text_iterator& operator++() {
      ++of_->next_;
      return *this;
    }
    /// Only with the end, which belongs to nobody.
    bool operator==(text_iterator const& other) const {
      auto const* const of = of_ != nullptr ? of_ : other.of_;
      return of == nullptr || of->next_ == of->end_;
    }

   private:
    request_handler* of_;
  };

  bool null() {
    scalar(nullptr);
    return true;
  }
  bool boolean(bool value) {
    scalar(value);
    return true;
  }
  bool number_integer(number_integer_t value) {
    scalar(value);
    return true;
  }
  bool number_unsigned(number_unsigned_t value) {
    scalar(value);
    return true;
  }
  bool number_float(number_float_t value, string_t const& /*text*/) {
    scalar(value);
    return true;
  }
  bool string(string_t& value) {
    scalar(value);
    return true;
  }
  static bool binary(binary_t& /*value*/) { return true; }  // does not occur in JSON text

  bool start_object(std::size_t /*elements*/) {
    if (open_.empty()) {
      open(place::request);
      return true;
    }
    auto const where = open_.back().where;
    if (where == place::inputs) {
      open_tensor(place::input, *request_.inputs, "inputs");
    } else if (where == place::outputs) {
      open_tensor(place::output, *request_.outputs, "outputs");
    } else if (where == place::shape) {
      fail("the shape of {} holds an object; it takes a list", subject());
    } else if (where == place::request && key_is("parameters")) {
      open(place::request_parameters);
    } else if ((where == place::input || where == place::output) && key_is("parameters")) {
      open(place::tensor_parameters);
    } else if (is_known_key()) {
      wrong_type("an object");
    } else {
      open(place::ignored);
    }
    return true;
  }

  bool key(string_t& name) {
    auto& current = open_.back();
    if (current.where != place::ignored) {
      if (!current.keys.insert(name).second) {
        fail("the key '{}' stands twice in {}; give it once", name, subject());
      }
      if (current.keys.size() > max_keys) fail("{} has more than {} keys", subject(), max_keys);
    }
    current.key = name;
    return true;
  }

  bool end_object() {
    open_.pop_back();
    return true;
  }

  bool start_array(std::size_t /*elements*/) {
    if (open_.empty())
      fail("{} is a list; it must be an object: {{\"inputs\": [ … ]}}", request_.document.what);
    auto const where = open_.back().where;
    if (where == place::shape) {
      fail("the shape of {} is nested; it takes a flat list of integers", subject());
    } else if (where == place::inputs || where == place::outputs) {
      fail("{} holds a list; it takes objects: {{\"name\": …}}", subject());
    } else if (where == place::request && key_is("inputs")) {
      request_.inputs.emplace();
      open(place::inputs);
    } else if (where == place::request && key_is("outputs")) {
      request_.outputs.emplace();
      open(place::outputs);
    } else if (where == place::input && key_is("shape")) {
      tensor_->shape.emplace();
      open(place::shape);
    } else if (where == place::input && key_is("data")) {
      open(place::data);
      pass_over_data();
    } else if (is_known_key()) {
      wrong_type("a list");
    } else {
      open(place::ignored);
    }
    return true;
  }

  bool end_array() {
    open_.pop_back();
    return true;
  }

  bool parse_error(std::size_t position, std::string const& token, json::exception const& cause) {
    // The library's message begins with its own name and code in brackets.
    std::string_view reason{cause.what()};
    if (auto const bracket = reason.find("] "); bracket != std::string_view::npos) {
      reason.remove_prefix(bracket + 2);
    }
    // Its line and column do not count what was passed over.
    if (reason.starts_with("parse error at line")) {
      reason.remove_prefix(std::min(reason.find(": ") + 2, reason.size()));
    }
    // the token ends where the parser gave up: at the first letter of NaN, Infinity or -Infinity
    bool const not_finite = token.ends_with('N') || token.ends_with('I');
    fail("{} is not JSON (byte {}): {}{}", request_.document.what, position + passed_over_,
         is_utf8(reason) ? reason : "it holds bytes that are not UTF-8",
         not_finite ? R"(; "NaN", "Infinity" and "-Infinity" are written in quotes)" : "");
  }

 private:
  struct level {
    place where;
    std::string key;             ///< the latest key of an object
    std::set<std::string> keys;  ///< all keys of an object so far
  };

  template <typename... Args>
  [[noreturn]] static void fail(fmt::format_string<Args...> format, Args&&... args) {
    throw error{error_kind::invalid_argument, fmt::format(format, std::forward<Args>(args)...)};
  }

  /// Moves on to the bracket that closes the list of data which the parser has just seen the
  /// beginning of.
  void pass_over_data() {
    auto const list =
        find_list(request_.document, next_ - 1, max_depth - open_.size() + 1, tensor_->label);
    if (list.empty()) too_deep();
    tensor_->data = list;
    passed_over_ += list.size() - 2;
    next_ = list.data() + list.size() - 1;
  }

  [[noreturn]] void too_deep() const {
    fail("{} nests deeper than {} levels", request_.document.what, max_depth);
  }

  [[nodiscard]] bool key_is(std::string_view name) const { return open_.back().key == name; }

  /// Whether the latest key means something where it stands.
  [[nodiscard]] bool is_known_key() const {
    switch (open_.back().where) {
      case place::request:
        return key_is("id") || key_is("inputs") || key_is("outputs") || key_is("parameters");
      case place::input:
        return key_is("name") || key_is("datatype") || key_is("shape") || key_is("data") ||
               key_is("parameters");
      case place::output:
        return key_is("name") || key_is("parameters");
      case place::ignored:
        return false;
      default:
        return true;
    }
  }

  /// The thing that is open, for messages.
  [[nodiscard]] std::string subject() const {
    switch (open_.back().where) {
      case place::inputs:
        return "'inputs'";
      case place::outputs:
        return "'outputs'";
      case place::request:
        return "the request";
      case place::request_parameters:
        return "the request's parameters";
      default:
        return tensor_ != nullptr ? tensor_->label : "the request";
    }
  }

  void open(place where) {
    if (open_.size() == max_depth) too_deep();
    open_.push_back({where, {}, {}});
  }

  void open_tensor(place where, std::vector<raw_tensor>& all, std::string_view list_name) {
    if (all.size() == max_tensors) fail("there are more than {} {}", max_tensors, list_name);
    tensor_ = &all.emplace_back();
    tensor_->label = fmt::format("{}[{}]", list_name, all.size() - 1);
    open(where);
  }

  [[noreturn]] void wrong_type(std::string_view found) const {
    std::string_view wanted = "a string, a number or a boolean";
    auto const where = open_.back().where;
    if (key_is("parameters") && where != place::request_parameters &&
        where != place::tensor_parameters) {
      wanted = "an object";
    } else if (where == place::request || where == place::input || where == place::output) {
      wanted = key_is("id") || key_is("name") || key_is("datatype") ? "a string" : "a list";
    }
    fail("'{}' of {} is {}; it takes {}", open_.back().key, subject(), found, wanted);
  }

  /// A scalar outside of shape and data.
  void scalar(json value) {
    if (open_.empty()) {
      fail("{} is a single value; it must be an object: {{\"inputs\": [ … ]}}",
           request_.document.what);
    }
    auto const where = open_.back().where;
    if (where == place::inputs || where == place::outputs) {
      fail("{} holds something other than objects; it takes {{\"name\": …}}", subject());
    }
    if (where == place::shape) {
      ++tensor_->shape->rank;
      auto& extents = tensor_->shape->extents;
      if (extents.size() < max_rank) extents.push_back(std::move(value));
      return;
    }
    if (where == place::ignored || !is_known_key()) return;
    if (where == place::request_parameters || where == place::tensor_parameters) {
      if (value.is_null()) wrong_type("null");
      auto& parameters =
          where == place::request_parameters ? request_.parameters : tensor_->parameters;
      parameters.insert_or_assign(open_.back().key, std::move(value));
      return;
    }
    bool const takes_text = key_is("id") || key_is("name") || key_is("datatype");
    if (!takes_text || !value.is_string()) wrong_type(describe(value));
    auto text = value.get<std::string>();
    if (key_is("id")) {
      request_.id = std::move(text);
    } else if (key_is("datatype")) {
      tensor_->type = std::move(text);
    } else {
      tensor_->label = fmt::format("{} '{}'", where == place::input ? "input" : "output", text);
      tensor_->name = std::move(text);
    }
  }

  static std::string_view describe(json const& value) {
    if (value.is_null()) return "null";
    if (value.is_string()) return "a string";
    return value.is_boolean() ? "a boolean" : "a number";
  }

  char const* next_;  ///< what the parser reads next
  char const* end_;
  std::size_t passed_over_ = 0;  ///< bytes that it has not seen
  std::vector<level> open_;
  raw_request request_;
  raw_tensor* tensor_ = nullptr;  ///< the element of inputs or outputs that is open
};

}  // namespace

raw_request read_raw_request(std::string_view text, std::string what) {
  if (text.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw error{error_kind::invalid_argument, what + " is larger than 4 GiB; send smaller batches"};
  }
  request_handler handler{json_document{std::move(what), text}};
  json::sax_parse(request_handler::text_iterator{&handler}, request_handler::text_iterator{nullptr},
                  &handler);
  return handler.take();
}

}  // namespace sluice::server
