#include "runtime/telemetry/error_table.hpp"

#include <algorithm>
#include <array>

namespace sluice::telemetry {
namespace {

struct error_row {
  error_kind kind;
  int http_status;
  int exit_code;
};

// Exit codes begin at 2: shells and `policy check` use 1 for "no". What a later attempt can change
// is 503 or 504.
constexpr std::array table{
    error_row{error_kind::invalid_argument, 400, 2},
    error_row{error_kind::not_found, 404, 3},
    error_row{error_kind::already_exists, 409, 4},
    error_row{error_kind::out_of_memory, 503, 5},
    error_row{error_kind::unavailable, 503, 6},
    error_row{error_kind::deadline_exceeded, 504, 7},
    error_row{error_kind::unsupported, 501, 8},
    error_row{error_kind::cancelled, 503, 9},
    error_row{error_kind::aborted, 500, 11},
    error_row{error_kind::model_error, 500, 12},
    error_row{error_kind::misconfigured, 500, 13},
    error_row{error_kind::internal, 500, 10},
};

error_row const& error_row_of(error_kind kind) noexcept {
  auto const* const found = std::find_if(
      table.begin(), table.end(), [kind](error_row const& entry) { return entry.kind == kind; });
  return found == table.end() ? table.back() : *found;
}

}  // namespace

int http_status(error_kind kind) noexcept {
  return error_row_of(kind).http_status;
}
int exit_code(error_kind kind) noexcept {
  return error_row_of(kind).exit_code;
}

}  // namespace sluice::telemetry
