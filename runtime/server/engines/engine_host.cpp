#include "runtime/server/engines/engine_host.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/engines/detail/engine_host_impl.hpp"
#include "runtime/server/engines/scheduling_settings.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

using nlohmann::json;
using std::chrono::milliseconds;

engine_host::impl::entry::entry(policy::model_policy of)
    : is(std::move(of)),
      in_time{is.slo.window, clock::now()},
      controller{scheduling_of(is), clock::now()} {}

engine_host::impl::impl(options how) : how_(std::move(how)), socket_folder_(folder_for_sockets()) {
  for (auto& each : how_.engines) {
    for (auto const& route : each.engine->routes) {
      routes_.add(route, engines_.size());
    }
    auto& now = engines_.emplace_back(std::move(each)).now;
    now.timer = std::make_unique<net::steady_timer>(io_);
    now.parking_timer = std::make_unique<net::steady_timer>(io_);
  }
  thread_ = std::thread{[this] {
    ::pthread_setname_np(::pthread_self(), "sluice-engines");
    work();
  }};
}

engine_host::impl::~impl() {
  stop(milliseconds{0});
  std::error_code ignored;
  std::filesystem::remove_all(socket_folder_, ignored);
}

void engine_host::impl::attach(engine_tenancy::access pool) {
  pool_.emplace(std::move(pool));
}

void engine_host::impl::start() {
  net::post(io_, [this] {
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      if (engines_[i].is.engine->start == policy::engine_start::at_boot) want(i);
    }
    watch();
  });
}

void engine_host::impl::drain() {
  {
    std::lock_guard const lock{mutex_};
    is_draining_ = true;
  }
  net::post(io_, [this] {  // no other one begins to start
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      if (!engines_[i].now.process) refuse_waiting(i, shutting_down());
    }
  });
}

void engine_host::impl::stop(milliseconds grace) {
  if (!thread_.joinable()) return;
  drain();
  std::promise<void> ended;
  net::post(io_, [&] {
    all_ended_ = &ended;
    watching_.cancel();
    is_ending_ = true;
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      engines_[i].now.timer->cancel();
      engines_[i].now.parking_timer->cancel();
      refuse_waiting(i, shutting_down());
      if (engines_[i].now.process) engines_[i].now.process->stop();
    }
    look_whether_all_ended();
  });
  (void)ended.get_future().wait_for(grace);
  net::post(io_, [this] {
    all_ended_ = nullptr;
    for (auto& each : engines_) {
      each.now.timer->cancel();
      each.now.parking_timer->cancel();
      each.now.look.reset();
      each.now.socket.reset();
      each.now.process.reset();
    }
    guard_.reset();
  });
  thread_.join();
  broker_.stop();
  broker_.join();
}

void engine_host::impl::work() {
  for (;;) {
    try {
      io_.run();
      return;
    } catch (std::exception const& failure) {
      spdlog::error("a step of the engines failed reason={}", telemetry::quoted(failure.what()));
    }
  }
}

std::filesystem::path engine_host::impl::folder_for_sockets() const {
  if (std::none_of(how_.engines.begin(), how_.engines.end(), [](auto const& each) {
        return each.engine->names(policy::socket_placeholder);
      })) {
    return {};
  }
  auto made = (how_.runtime_folder / "engines-XXXXXX").string();
  if (::mkdtemp(made.data()) == nullptr) {
    throw error{error_kind::unavailable,
                fmt::format("no folder for the sockets of engines can be made in {}",
                            how_.runtime_folder.string())};
  }
  return made;
}

engine_host::engine_host(options how) : impl_(std::make_unique<impl>(std::move(how))) {}
engine_host::~engine_host() = default;

void engine_host::attach(engine_tenancy::access pool) {
  impl_->attach(std::move(pool));
}
void engine_host::start() {
  impl_->start();
}
void engine_host::drain() {
  impl_->drain();
}
void engine_host::stop(milliseconds grace) {
  impl_->stop(grace);
}
std::optional<std::size_t> engine_host::find(std::string_view target) const {
  return impl_->routes().find(target);
}
std::string const& engine_host::name_of(std::size_t engine) const {
  return impl_->at(engine).name;
}
engine_limits engine_host::limits_of(std::size_t engine) const {
  return {impl_->request_timeout(), impl_->at(engine).engine->max_silence};
}
engine_ticket engine_host::enter(std::size_t engine,
                                 std::function<void(engine_admission)> admitted) {
  return impl_->enter(engine, std::move(admitted));
}
void engine_host::send_back(engine_ticket which) {
  impl_->send_back(which);
}
void engine_host::leave(engine_ticket which, relay_report const& report) {
  impl_->leave(which, report);
}
std::vector<std::string> engine_host::names() const {
  std::vector<std::string> all;
  all.reserve(impl_->size());
  for (std::size_t i = 0; i < impl_->size(); ++i) all.push_back(name_of(i));
  return all;
}
std::optional<std::size_t> engine_host::place_of(std::string_view name) const {
  for (std::size_t i = 0; i < impl_->size(); ++i) {
    if (name_of(i) == name) return i;
  }
  return std::nullopt;
}
readiness engine_host::ready(std::size_t engine) const {
  return impl_->ready(engine);
}
std::vector<std::string> engine_host::faults() const {
  return impl_->faults();
}
json engine_host::status() const {
  return impl_->status();
}

}  // namespace sluice::server
