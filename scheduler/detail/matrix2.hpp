/// Two by two matrices, which is all that chains of two phases need.
#pragma once

#include <array>

namespace sluice::scheduler::detail {

struct matrix2 {
  double a = 0.0, b = 0.0, c = 0.0, d = 0.0;  ///< row by row

  [[nodiscard]] constexpr matrix2 operator+(matrix2 const& o) const noexcept {
    return {a + o.a, b + o.b, c + o.c, d + o.d};
  }
  [[nodiscard]] constexpr matrix2 operator*(matrix2 const& o) const noexcept {
    return {a * o.a + b * o.c, a * o.b + b * o.d, c * o.a + d * o.c, c * o.b + d * o.d};
  }
  [[nodiscard]] constexpr matrix2 operator*(double by) const noexcept {
    return {a * by, b * by, c * by, d * by};
  }
  /// Not a number throughout if there is none.
  [[nodiscard]] constexpr matrix2 inverse() const noexcept {
    double const determinant = a * d - b * c;
    return matrix2{d, -b, -c, a} * (1.0 / determinant);
  }
  /// Of a row vector.
  [[nodiscard]] constexpr std::array<double, 2> applied_to(
      std::array<double, 2> const& row) const noexcept {
    return {row[0] * a + row[1] * c, row[0] * b + row[1] * d};
  }
};

}  // namespace sluice::scheduler::detail
