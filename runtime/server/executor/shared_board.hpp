/// A host_board in memory that a server and its executor share.
///
///   auto const made = make_shared_board();                          // the server's
///   send_message(socket, body, {made.file.get()});
///   auto const seen = open_shared_board(std::move(descriptor));     // the executor's
#pragma once

#include <memory>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/inference/host_board.hpp"

namespace sluice::server {

struct shared_board {
  std::shared_ptr<host_board> board;
  memhandover::unique_fd file;
};

/// Throws `out_of_memory` or `unavailable`.
[[nodiscard]] shared_board make_shared_board();
/// Throws `invalid_argument` if that file is none.
[[nodiscard]] std::shared_ptr<host_board> open_shared_board(memhandover::unique_fd file);

}  // namespace sluice::server
