/// One look whether an engine can be asked: a connection, and where there is a path, a GET that is answered 2xx.
///
///   auto const look =
///       look_whether_ready(io, address, "/health", [](std::string const& why_not) {});
///
/// Threads: on that of `io` alone.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <functional>
#include <memory>
#include <string>

#include "runtime/server/inference/engine_gateway.hpp"

namespace sluice::server {

/// `done` is called once, with nothing if it is ready. Returns what gives the look up when it is destroyed: then `done` is not called.
[[nodiscard]] std::shared_ptr<void> look_whether_ready(
    boost::asio::any_io_executor const& io, engine_address const& address, std::string const& path,
    std::function<void(std::string const& why_not)> done);

}  // namespace sluice::server
