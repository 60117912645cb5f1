/// Says on a board which thread ends this process: by a signal that it brings upon itself (a crash, abort) or by `exit`.
///
///   report_end_on(board);
///
/// Once, and late: what was registered with `atexit` afterwards would run before. A thread other than the first that calls
/// `exit` ends the process without destroying what the others use.
#pragma once

#include <memory>

#include "runtime/server/inference/host_board.hpp"

namespace sluice::server {

/// The board stays mapped until the process ends. Signals take their usual course afterwards.
void report_end_on(std::shared_ptr<host_board> board);

}  // namespace sluice::server
