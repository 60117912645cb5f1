#include "runtime/server/engines/readiness_probe.hpp"

#include <fmt/format.h>

#include <utility>

#include "runtime/server/engines/engine_question.hpp"

namespace sluice::server {

std::shared_ptr<void> look_whether_ready(boost::asio::any_io_executor const& io,
                                         engine_address const& address, std::string const& path,
                                         std::function<void(std::string const& why_not)> done) {
  return ask_engine(io, address, {path, 0},
                    [path, done = std::move(done)](engine_answer const& answer) {
                      bool const is_asked = answer.failure.empty() && !path.empty();
                      done(is_asked && answer.status / 100 != 2
                               ? fmt::format("GET {} is answered {}", path, answer.status)
                               : answer.failure);
                    });
}

}  // namespace sluice::server
