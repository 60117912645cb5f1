#include "runtime/server/executor/detail/spare_process.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/processes.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/waiting.hpp"
#include "memhandover/base/wire.hpp"
#include "runtime/server/executor/parcel.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server::detail {
namespace {

using memhandover::unique_fd;

bool has_hung_up(int socket) {
  pollfd waited{socket, 0, 0};
  return ::poll(&waited, 1, 0) > 0 && (waited.revents & (POLLHUP | POLLERR)) != 0;
}

}  // namespace

connected_process start_connected(std::filesystem::path const& program) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw memhandover::system_error("cannot start an executor");
  }
  auto ours = memhandover::beside_standard_streams(unique_fd{ends[0]});
  auto theirs = memhandover::beside_standard_streams(unique_fd{ends[1]});
  auto child = child_process::start(
      {program.string(), "--socket", std::to_string(child_process::passed_descriptor)},
      std::move(theirs));
  return {std::move(child), std::move(ours)};
}

void spare_process::want(nlohmann::json preparation) {
  preparation_ = std::move(preparation);
}

bool spare_process::is_due(clock::time_point now) const {
  return preparation_ && phase_ == phase::none && now >= next_start_;
}

void spare_process::start(clock::time_point now) {
  since_ = now;
  reason_.clear();
  try {
    process_ = start_connected(program_);
    end_ = memhandover::open_process(process_.child.pid(),
                                     memhandover::process_start_ticks(process_.child.pid()));
    phase_ = phase::starting;
    memhandover::send_message(process_.socket.get(), {{"type", "prepare"}, {"for", *preparation_}});
  } catch (error const& failure) {
    if (phase_ == phase::starting) {  // it has ended already
      fail({}, now);
      return;
    }
    reason_ = failure.what();
    on_end(now);
  }
}

void spare_process::hear(clock::time_point now) {
  if (phase_ == phase::ending) {
    if (!end_ || memhandover::is_ready(end_.get(), POLLIN)) {
      on_end(now);
    }
    return;
  }
  if (phase_ == phase::starting && now >= since_ + start_limit_) {
    fail(fmt::format("it was not ready within {} ms", start_limit_.count()), now);
    return;
  }
  try {
    while ((phase_ == phase::starting || phase_ == phase::ready) &&
           memhandover::is_ready(process_.socket.get(), POLLIN)) {
      auto const received = memhandover::receive_what_came(process_.socket.get());
      if (!received) {
        fail({}, now);
        return;
      }
      take_in(received->body, now);
    }
  } catch (std::exception const& failure) {
    fail(fmt::format("what it says is not understood: {}", failure.what()), now);
  }
}

void spare_process::take_in(nlohmann::json const& said, clock::time_point now) {
  auto const type = said.value("type", "");
  if (type == "prepared" && phase_ == phase::starting) {
    phase_ = phase::ready;
    since_ = now;
  } else if (type == "failed") {
    reason_ = failure_in(said).what();
  }
}

spare_process::clock::time_point spare_process::next_look() const {
  switch (phase_) {
    case phase::none:
      return preparation_ ? next_start_ : clock::time_point::max();
    case phase::starting:
      return since_ + start_limit_;
    case phase::ready:
    case phase::ending:
      break;
  }
  return clock::time_point::max();
}

int spare_process::awaited() const noexcept {
  return phase_ == phase::none ? -1 : phase_ == phase::ending ? end_.get() : process_.socket.get();
}

std::optional<spare_process::taken_process> spare_process::take() {
  if ((phase_ != phase::starting && phase_ != phase::ready) || has_hung_up(process_.socket.get())) {
    return std::nullopt;
  }
  taken_process taken{std::exchange(process_, {}), phase_ == phase::ready};
  if (taken.was_ready) {
    back_off_ = {};
    last_reason_.clear();
  }
  end_.reset();
  phase_ = phase::none;
  next_start_ = {};
  return taken;
}

void spare_process::end() {
  preparation_.reset();
  process_.child.kill();
}

std::string_view spare_process::state() const noexcept {
  return phase_ == phase::ready ? "ready" : phase_ == phase::starting ? "starting" : "none";
}

pid_t spare_process::pid() const noexcept {
  return phase_ == phase::ready || phase_ == phase::starting ? process_.child.pid() : 0;
}

/// It ends, or is ended; it has when its pidfd says so.
void spare_process::fail(std::string why, clock::time_point now) {
  if (reason_.empty()) {
    reason_ = std::move(why);
  }
  if (phase_ == phase::ready && now - since_ >= proven) {
    back_off_ = {};
    last_reason_.clear();
  }
  process_.child.kill();
  process_.socket.reset();
  phase_ = phase::ending;
  if (!end_) {  // it has ended before it could be watched
    on_end(now);
  }
}

void spare_process::on_end(clock::time_point now) {
  if (process_.child.pid() != 0) {
    auto const how = process_.child.wait();
    reason_ = reason_.empty() ? "its process " + how.text : reason_;
  }
  process_ = {};
  end_.reset();
  phase_ = phase::none;
  back_off_ = std::clamp(2 * back_off_, first_back_off, longest_back_off);
  next_start_ = now + back_off_;
  if (preparation_) {
    bool const is_new = reason_ != last_reason_;
    spdlog::log(is_new ? spdlog::level::warn : spdlog::level::debug,
                "no spare executor is ready, another is started in {} ms reason={}",
                back_off_.count(), telemetry::quoted(reason_));
    last_reason_ = reason_;
  }
}

}  // namespace sluice::server::detail
