/// Says on a board which thread ends this process: by a signal that it brings upon itself (a crash, abort) or by `exit`.
///
///   report_end_on(board);
///
/// Once, and late: what was registered with `atexit` afterwards would run before.
#pragma once

#include <memory>

#include "runtime/server/inference/host_board.hpp"

namespace sluice::server {

/// The board stays mapped until the process ends. Signals take their usual course afterwards.
void report_end_on(std::shared_ptr<host_board> board);

}  // namespace sluice::server
