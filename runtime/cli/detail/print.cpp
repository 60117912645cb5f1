#include "runtime/cli/detail/print.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "memhandover/base/error.hpp"

namespace sluice::cli::detail {

void print(std::string const& text) {
  if (std::fputs(text.c_str(), stdout) == EOF || std::fflush(stdout) != 0) {
    throw error{error_kind::unavailable,
                fmt::format("standard output cannot be written: {}", std::strerror(errno))};
  }
}

}  // namespace sluice::cli::detail
