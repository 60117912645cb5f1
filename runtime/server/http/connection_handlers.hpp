/// What the parts of connection.cpp, connection_body.cpp and connection_answer.cpp are joined by: steps of a connection as handlers.
#pragma once

#include <spdlog/spdlog.h>

#include <boost/asio/post.hpp>
#include <exception>
#include <utility>

#include "runtime/server/http/connection.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

inline constexpr auto const* too_many_large_bodies =
    "too many large bodies are being read; try again later";

template <typename... Args>
auto connection::on(void (connection::*step)(Args...)) {
  return [self = shared_from_this(), step](Args... args) {
    if (self->state_ == state_t::closed) return;
    try {
      ((*self).*step)(args...);
    } catch (std::exception const& failure) {
      spdlog::error("connection ended by an exception reason={}",
                    telemetry::quoted(failure.what()));
      self->close();
    }
  };
}

template <typename Step>
void connection::post(Step step) {
  boost::asio::post(stream_.get_executor(),
                    [self = shared_from_this(), step = std::move(step)]() mutable {
                      if (self->state_ == state_t::closed) return;
                      try {
                        step(*self);
                      } catch (std::exception const& failure) {
                        spdlog::error("connection ended by an exception reason={}",
                                      telemetry::quoted(failure.what()));
                        self->close();
                      }
                    });
}

template <typename Work>
void connection::compute(Work work, boost::asio::any_io_executor const& where) {
  boost::asio::post(where, [self = shared_from_this(), work = std::move(work)] {
    try {
      work(*self);
    } catch (std::exception const& failure) {
      spdlog::error("connection ended by an exception reason={}",
                    telemetry::quoted(failure.what()));
      self->abort();
    }
  });
}

}  // namespace sluice::server
