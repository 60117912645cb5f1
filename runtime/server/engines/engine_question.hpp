/// One question of the server's own to an engine: a connection, a GET, and its answer.
///
///   auto const question =
///       ask_engine(io, address, {"/v1/models", 1_MiB}, [](engine_answer const& answer) {});
///
/// Threads: on that of `io` alone.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "memhandover/base/bytes.hpp"
#include "runtime/server/inference/engine_gateway.hpp"

namespace sluice::server {

using namespace sluice::literals;

struct engine_inquiry {
  std::string path;            ///< empty: whether it listens is all
  std::uint64_t most_bytes{};  ///< of the answer's body; 0: it is not read
};

struct engine_answer {
  std::string failure;  ///< why there is none; empty: there is
  unsigned status = 0;
  std::string body{};
};

/// `done` is called once, within some seconds. Returns what gives the question up when it is destroyed: then `done` is not called.
[[nodiscard]] std::shared_ptr<void> ask_engine(boost::asio::any_io_executor const& io,
                                               engine_address const& address,
                                               engine_inquiry const& what,
                                               std::function<void(engine_answer const&)> done);

}  // namespace sluice::server
