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

namespace {

std::vector<std::string> names_of(policy::model_policy const& model) {
  std::vector<std::string> names{model.name};
  names.insert(names.end(), model.engine->served_names.begin(), model.engine->served_names.end());
  return names;
}

}  // namespace

engine_host::impl::entry::entry(policy::model_policy of)
    : is(std::move(of)),
      models{names_of(is), std::chrono::system_clock::now()},
      described{names_of(is)},
      kept{is.engine->kept_connections},
      in_time{is.slo.window, clock::now()},
      tokens{is.slo, clock::now()},
      controller{scheduling_of(is), clock::now()} {}

engine_host::impl::impl(options how) : how_(std::move(how)) {
  for (auto& each : how_.engines) {
    for (auto const& route : each.engine->routes) {
      routes_.add(route, {engine_route::kind::path, engines_.size()});
    }
    if (each.engine->api == policy::engine_api::oip) {
      for (auto const& name : names_of(each)) routes_.add_model(name, engines_.size());
    }
    if (each.engine->api == policy::engine_api::openai) {
      routes_.add("/v1/*", {engine_route::kind::model});
      for (auto const& name : names_of(each)) by_name_.emplace(name, engines_.size());
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
}

void engine_host::impl::attach(engine_tenancy::access pool) {
  std::lock_guard const lock{mutex_};
  pool_.emplace(std::move(pool));
}

void engine_host::impl::start() {
  net::post(io_, [this] {
    may_start_ = true;
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      if (engines_[i].is.engine->start == policy::engine_start::at_boot) want(i);
    }
    next_turn();
    watch();
  });
}

void engine_host::impl::set_announcer(std::function<void()> announce) {
  std::lock_guard const lock{mutex_};
  announce_ = std::move(announce);
}

void engine_host::impl::change(std::vector<policy::model_policy> const& wanted) {
  net::post(io_, [this, wanted] {
    {
      std::lock_guard const lock{mutex_};
      for (auto& engine : engines_) {
        auto const its = std::find_if(wanted.begin(), wanted.end(), [&](auto const& each) {
          return each.name == engine.is.name;
        });
        if (its == wanted.end()) continue;
        engine.is.warm = its->warm;
        engine.controller.set_limits(idle_limits_of(its->warm));
      }
    }
    watch();
  });
}

void engine_host::impl::drain() {
  {
    std::lock_guard const lock{mutex_};
    is_draining_ = true;
    for (auto& each : engines_) each.kept.drop();
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
    closing_.cancel();
    is_ending_ = true;
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      engines_[i].now.timer->cancel();
      engines_[i].now.parking_timer->cancel();
      refuse_waiting(i, shutting_down());
      end_in_order(i);
    }
    forget_retired();
    look_whether_all_ended();
  });
  (void)ended.get_future().wait_for(grace);
  net::post(io_, [this] {
    all_ended_ = nullptr;
    for (auto& each : engines_) drop_process(each);
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

engine_host::engine_host(options how) : impl_(std::make_unique<impl>(std::move(how))) {}
engine_host::~engine_host() = default;

void engine_host::attach(engine_tenancy::access pool) {
  impl_->attach(std::move(pool));
}
std::size_t engine_host::meet() {
  return impl_->meet();
}
void engine_host::adopt() {
  impl_->adopt();
}
std::size_t engine_host::adopted() const {
  return impl_->adopted();
}
void engine_host::start() {
  impl_->start();
}
void engine_host::set_announcer(std::function<void()> announce) {
  impl_->set_announcer(std::move(announce));
}
void engine_host::change(std::vector<policy::model_policy> const& wanted) {
  impl_->change(wanted);
}
void engine_host::drain() {
  impl_->drain();
}
void engine_host::leave() {
  impl_->leave();
}
void engine_host::release() {
  impl_->release();
}
std::size_t engine_host::in_flight() const {
  return impl_->in_flight();
}
void engine_host::stop(milliseconds grace) {
  impl_->stop(grace);
}
std::optional<engine_route> engine_host::find(std::string_view target) const {
  return impl_->routes().find(target);
}
std::optional<std::size_t> engine_host::find_model(std::string_view name) const {
  return impl_->find_model(name);
}
std::vector<std::string> engine_host::model_names() const {
  return impl_->model_names();
}
json engine_host::models() const {
  return impl_->models();
}
std::string const& engine_host::name_of(std::size_t engine) const {
  return impl_->at(engine).name;
}
engine_limits engine_host::limits_of(std::size_t engine) const {
  auto const& is = *impl_->at(engine).engine;
  return {impl_->request_timeout(), is.max_silence, is.kept_connections > 0};
}
engine_ticket engine_host::enter(std::size_t engine,
                                 std::function<void(engine_admission)> admitted) {
  return impl_->enter(engine, std::move(admitted));
}
engine_connection engine_host::reuse(engine_ticket which) {
  return impl_->reuse(which);
}
void engine_host::keep(engine_ticket which, engine_connection connection) {
  impl_->keep(which, std::move(connection));
}
void engine_host::note_tokens(engine_ticket which, token_times const& came) {
  impl_->note_tokens(which, came);
}
void engine_host::send_back(engine_ticket which) {
  impl_->send_back(which);
}
void engine_host::leave(engine_ticket which, relay_report const& report) {
  impl_->leave(which, report);
}
std::vector<std::string> engine_host::names() const {
  return impl_->names();
}
std::optional<std::size_t> engine_host::place_of(std::string_view name) const {
  return impl_->place_of(name);
}
model_metadata engine_host::metadata(std::string const& model, std::string const& version) const {
  return impl_->metadata(model, version);
}
json engine_host::config(std::string const& model, std::string const& version) const {
  return impl_->config(model, version);
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
