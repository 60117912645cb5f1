/// The scalars of a JSON list of any nesting, in order, and the shape that the nesting spells.
///
///   nested_list list;   // [[1, 2]]
///   list.open();
///   list.open();
///   list.add_unsigned(1);
///   list.add_unsigned(2);
///   list.close();
///   list.close();
///   list.extents();     // {1, 2}
///   list.problem();     // empty, or "is ragged: …"
///
/// Holds nine bytes per element, however little text an element took, so that a request's memory
/// stays a small multiple of its body. The first fault of the nesting is kept as a half sentence;
/// what comes after it is not stored.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::server {

class nested_list {
 public:
  enum class kind_t : std::uint8_t { null, boolean, negative, natural, real, string };

  void open();
  void close();
  void add_null() { add(kind_t::null, 0); }
  void add_boolean(bool value) { add(kind_t::boolean, value ? 1 : 0); }
  void add_signed(std::int64_t value) {
    add(value < 0 ? kind_t::negative : kind_t::natural, static_cast<std::uint64_t>(value));
  }
  void add_unsigned(std::uint64_t value) { add(kind_t::natural, value); }
  void add_real(double value) { add(kind_t::real, std::bit_cast<std::uint64_t>(value)); }
  void add_string(std::string_view text);

  [[nodiscard]] std::size_t size() const noexcept { return kinds_.size(); }
  [[nodiscard]] kind_t kind(std::size_t i) const { return kinds_[i]; }
  /// The element's value: 0 or 1, two's complement, number, or the double's bits.
  [[nodiscard]] std::uint64_t bits(std::size_t i) const { return bits_[i]; }
  [[nodiscard]] double real(std::size_t i) const { return std::bit_cast<double>(bits_[i]); }
  [[nodiscard]] std::string_view string(std::size_t i) const;
  /// All strings, each behind its length as a little-endian u32: the protocol's form of BYTES.
  [[nodiscard]] std::string const& strings() const noexcept { return strings_; }
  /// The element as JSON would write it, shortened if long.
  [[nodiscard]] std::string text(std::size_t i) const;

  /// How many elements the lists of each level have, from the outermost inwards. Meaningful without
  /// a problem.
  [[nodiscard]] std::vector<std::size_t> extents() const;
  [[nodiscard]] std::string const& problem() const noexcept { return problem_; }

 private:
  struct level {
    std::size_t count = 0;   ///< elements so far in the list that is open at this level
    std::size_t extent = 0;  ///< elements of the lists closed at this level
    bool closed_one = false;
  };

  void add(kind_t kind, std::uint64_t bits);
  void fail(std::string message);

  std::vector<kind_t> kinds_;
  std::vector<std::uint64_t> bits_;
  std::string strings_;
  std::vector<level> levels_;
  std::size_t depth_ = 0;       ///< lists open now
  std::size_t leaf_depth_ = 0;  ///< depth at which scalars stand; 0: none seen yet
  std::string problem_;
};

}  // namespace sluice::server
