/// Which model a JSON body is for, found while the body comes: the text of the key "model" of its outermost object.
///
///   named_body body;
///   body.take(R"({"messages": [{"model": "x"}], "mod)");
///   body.model();  // nothing yet
///   body.take(R"(el": "chat"})");
///   body.model();   // "chat"
///   body.finish();  // the body was one JSON object, to its end
///
/// Nothing of the body is kept but that text. Whoever gets the body afterwards reads it by a parser of its own, so all that two of
/// them might understand differently throws `invalid_argument`: what is not JSON as RFC 8259 has it, in UTF-8, without a byte order
/// mark; a model that stands there twice, however its key is written, or under a key that differs in its case alone; deeper nesting
/// than `deepest_body`. Parsed by Boost.JSON.
///
/// Not thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace sluice::server {

inline constexpr std::size_t deepest_body = 256;
/// Of a model's name; a longer one is nobody's.
inline constexpr std::size_t longest_model_name = 512;

class named_body {
 public:
  named_body();
  ~named_body();
  named_body(named_body&&) noexcept;
  named_body& operator=(named_body&&) noexcept;
  named_body(named_body const&) = delete;
  named_body& operator=(named_body const&) = delete;

  /// The next piece, however it is cut. Throws; then nothing more may be asked of it.
  void take(std::string_view piece);
  /// Throws if the body has not ended where it is, or names no model.
  void finish();
  /// Null until it has come.
  [[nodiscard]] std::string const* model() const noexcept;

 private:
  class handler;
  struct reading;
  std::unique_ptr<reading> reading_;
};

}  // namespace sluice::server
