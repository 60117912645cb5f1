/// What handlers of Boost.JSON's parser have alike here: names, sizes without a bound, since a body's size is bounded elsewhere, and
/// events that say nothing about contents.
#pragma once

#include <boost/json/string_view.hpp>
#include <boost/system/error_code.hpp>
#include <cstddef>
#include <limits>

namespace sluice::server {

/// To be derived from. The names are the parser's.
struct json_events {
  using error_code = boost::system::error_code;
  using text = boost::json::string_view;

  static constexpr std::size_t max_object_size = std::numeric_limits<std::size_t>::max();
  static constexpr std::size_t max_array_size = max_object_size;
  static constexpr std::size_t max_key_size = max_object_size;
  static constexpr std::size_t max_string_size = max_object_size;

  static bool on_document_begin(error_code& /*failure*/) { return true; }
  static bool on_document_end(error_code& /*failure*/) { return true; }
  static bool on_comment_part(text /*part*/, error_code& /*failure*/) { return true; }
  static bool on_comment(text /*part*/, error_code& /*failure*/) { return true; }
};

}  // namespace sluice::server
