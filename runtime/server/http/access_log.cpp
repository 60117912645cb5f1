#include "runtime/server/http/access_log.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/formatter.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t longest_path = 256, longest_name = 128;
constexpr auto between_complaints = 1min;
constexpr mode_t mode_of_file = 0640;

/// Of a client's text as much as may stand in a line.
std::string bounded(std::string_view text, std::size_t most) {
  return text.size() <= most ? telemetry::quoted(text)
                             : telemetry::quoted(std::string{text.substr(0, most)} + "…");
}

double ms(std::chrono::nanoseconds time) {
  return std::chrono::duration<double, std::milli>{time}.count();
}

}  // namespace

std::string line_of(access_entry const& entry) {
  auto line = fmt::format("request peer={} method={} path={}", entry.peer,
                          bounded(entry.method, longest_name), bounded(entry.path, longest_path));
  auto const add = [&line](char const* key, std::string const& value) {
    if (!value.empty()) line += fmt::format(" {}={}", key, bounded(value, longest_name));
  };
  add("model", entry.model);
  add("version", entry.version);
  add("id", entry.id);
  line += fmt::format(" status={} bytes_in={} bytes_out={} total_ms={:.3f}", entry.status,
                      entry.bytes_in, entry.bytes_out, ms(entry.total));
  if (entry.times) {
    line += fmt::format(" queue_ms={:.3f} compute_ms={:.3f}", ms(entry.times->queue),
                        ms(entry.times->compute));
  }
  if (!entry.cause.empty()) line += fmt::format(" cause={}", entry.cause);
  return line;
}

access_log::access_log(std::string target)
    : target_(std::move(target)), program_(spdlog::default_logger()->name()) {
  open();
  thread_ = std::thread{[this] { work(); }};
}

access_log::~access_log() {
  {
    std::lock_guard const lock{mutex_};
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void access_log::open() {
  file_ = target_ == "stderr"
              ? memhandover::duplicate(STDERR_FILENO)
              : memhandover::unique_fd{::open(
                    target_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, mode_of_file)};
  if (!file_) {
    throw memhandover::system_error(fmt::format("server.access_log: cannot write to {}", target_),
                                    error_kind::invalid_argument);
  }
}

void access_log::open_if_moved() {
  if (target_ == "stderr") return;
  struct stat here {
  }, there{};
  bool const is_there = ::stat(target_.c_str(), &there) == 0;
  if (file_ && is_there && ::fstat(file_.get(), &here) == 0 && here.st_ino == there.st_ino &&
      here.st_dev == there.st_dev) {
    return;
  }
  try {
    open();
  } catch (error const&) {  // `append` says so
    file_.reset();
  }
}

bool access_log::append(std::string_view lines) {
  while (file_ && !lines.empty()) {
    auto const written = ::write(file_.get(), lines.data(), lines.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    lines.remove_prefix(static_cast<std::size_t>(written));
  }
  if (file_ && lines.empty()) return true;
  auto const reason = file_ ? memhandover::reason_of(errno) : "it cannot be opened";
  if (auto const now = std::chrono::steady_clock::now(); now - complained_ > between_complaints) {
    complained_ = now;
    spdlog::error("the access log cannot be written file={} reason={}", telemetry::quoted(target_),
                  telemetry::quoted(reason));
  }
  return false;
}

void access_log::write(access_entry entry) {
  bool is_first = false;
  {
    std::lock_guard const lock{mutex_};
    if (waiting_.size() >= most_waiting) {
      ++dropped_;
      return;
    }
    is_first = waiting_.empty();
    waiting_.push_back({std::chrono::system_clock::now(), std::move(entry)});
  }
  if (is_first) changed_.notify_one();
}

void access_log::work() {
  std::vector<timed> batch;
  spdlog::memory_buf_t lines;
  auto const formatter = telemetry::make_line_formatter();
  auto const add = [&](std::chrono::system_clock::time_point at, spdlog::level::level_enum level,
                       std::string const& text) {
    formatter->format({at, spdlog::source_loc{}, program_, level, text}, lines);
  };
  bool is_written = true;
  std::unique_lock lock{mutex_};
  while (true) {
    changed_.wait(lock, [this] { return is_ending_ || !waiting_.empty(); });
    if (waiting_.empty() && (dropped_ == 0 || !is_written)) return;
    batch.swap(waiting_);
    auto const dropped = std::exchange(dropped_, 0);
    lock.unlock();
    lines.clear();
    for (auto const& each : batch) {
      add(each.at, spdlog::level::info, line_of(each.entry));
    }
    if (dropped > 0) {
      add(std::chrono::system_clock::now(), spdlog::level::warn,
          fmt::format("lines of the access log were dropped lines={}", dropped));
    }
    open_if_moved();
    is_written = append({lines.data(), lines.size()});
    auto const lost = is_written ? 0 : batch.size() + dropped;
    batch.clear();
    lock.lock();
    dropped_ += lost;
  }
}

}  // namespace sluice::server
