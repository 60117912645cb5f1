/// Any exception as an error of ours.
#pragma once

#include <exception>
#include <new>

#include "memhandover/base/error.hpp"

namespace sluice::server {

/// The one that is being handled: to be called from a handler.
[[nodiscard]] inline error caught_error() {
  try {
    throw;
  } catch (error const& known) {
    return known;
  } catch (std::bad_alloc const&) {
    return {error_kind::out_of_memory, "this process is out of memory"};
  } catch (std::exception const& other) {
    return {error_kind::internal, other.what()};
  } catch (...) {
    return {error_kind::internal, "an exception of unknown type was thrown"};
  }
}

}  // namespace sluice::server
