#include "runtime/server/http/access_log.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spdlog/formatter.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
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
/// At the end nobody waits any longer for who reads a pipe and takes nothing of it.
constexpr auto longest_stall = 3s;
constexpr auto stall_look = 100ms;
constexpr mode_t mode_of_file = 0640;

/// Of a client's text as much as may stand in a line.
std::string bounded(std::string_view text, std::size_t most) {
  return text.size() <= most ? telemetry::quoted(text)
                             : telemetry::quoted(std::string{text.substr(0, most)} + "…");
}

double ms(std::chrono::nanoseconds time) {
  return std::chrono::duration<double, std::milli>{time}.count();
}

[[noreturn]] void refuse(std::string const& target, int error_number) {
  auto const doing = fmt::format("server.access_log: cannot write to {}", target);
  if (error_number == ENXIO) {
    throw error{error_kind::invalid_argument,
                doing + ": nobody reads that pipe; start its reader first"};
  }
  throw memhandover::system_error(doing, error_kind::invalid_argument, error_number);
}

/// Null if it cannot, with errno. Of a pipe that nobody reads the opening would wait.
memhandover::unique_fd opened(std::string const& target, int more) {
  constexpr int for_lines = O_WRONLY | O_APPEND | O_CLOEXEC | O_NONBLOCK;
  memhandover::unique_fd file{::open(target.c_str(), for_lines | more, mode_of_file)};
  if (file) (void)::fcntl(file.get(), F_SETFL, O_APPEND);  // its writes may wait
  return file;
}

}  // namespace

void check_access_log(std::string const& target) {
  if (target == "stderr" || opened(target, 0)) return;
  if (errno != ENOENT) refuse(target, errno);
  auto const slash = target.rfind('/');
  auto const folder = slash == std::string::npos ? std::string{"."} : target.substr(0, slash + 1);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) refuse(target, errno);
}

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
  file_ = target_ == "stderr" ? memhandover::duplicate(STDERR_FILENO) : opened(target_, O_CREAT);
  if (!file_) refuse(target_, errno);
  was_cut_ = false;
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

/// Unless somebody has emptied the file since.
bool access_log::ends_in_a_cut_line() const {
  struct stat about {};
  return was_cut_ && file_ && ::fstat(file_.get(), &about) == 0 &&
         (!S_ISREG(about.st_mode) || about.st_size > 0);
}

/// Until a pipe takes as much as is written at once; false: it does not, and the log is to end.
bool access_log::await_room() {
  pollfd awaited{file_.get(), POLLOUT, 0};
  for (auto begin = std::chrono::steady_clock::now();;) {
    auto const came = ::poll(&awaited, 1, static_cast<int>(stall_look / 1ms));
    if (came > 0 || (came < 0 && errno != EINTR)) return true;  // a write says what is wrong
    std::lock_guard const lock{mutex_};
    auto const now = std::chrono::steady_clock::now();
    if (!is_ending_) begin = now;
    if (now - begin > longest_stall) return false;
  }
}

std::uint64_t access_log::append(std::string_view lines) {
  auto const write_all = [this](std::string_view& left) {
    while (file_ && !left.empty()) {
      if (!await_room()) {
        errno = ETIMEDOUT;
        break;
      }
      // No more than a pipe with room takes at once.
      auto const written =
          ::write(file_.get(), left.data(), std::min<std::size_t>(left.size(), PIPE_BUF));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) break;
      left.remove_prefix(static_cast<std::size_t>(written));
    }
  };
  std::string_view line_end = ends_in_a_cut_line() ? "\n" : "";
  write_all(line_end);
  auto left = lines;
  if (line_end.empty()) write_all(left);
  if (file_ && left.empty()) {
    was_cut_ = false;
    return 0;
  }
  auto const reason = file_ ? memhandover::reason_of(errno) : "it cannot be opened";
  if (auto const written = lines.size() - left.size(); written > 0) {
    was_cut_ = lines[written - 1] != '\n';
  } else if (line_end.empty()) {
    was_cut_ = false;
  }
  if (auto const now = std::chrono::steady_clock::now(); now - complained_ > between_complaints) {
    complained_ = now;
    spdlog::error("the access log cannot be written file={} reason={}", telemetry::quoted(target_),
                  telemetry::quoted(reason));
  }
  return static_cast<std::uint64_t>(std::count(left.begin(), left.end(), '\n'));
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
    if (dropped > 0) {  // the last line
      add(std::chrono::system_clock::now(), spdlog::level::warn,
          fmt::format("lines of the access log were dropped lines={}", dropped));
    }
    open_if_moved();
    auto const missing = append({lines.data(), lines.size()});
    is_written = missing == 0;
    auto const lost = is_written || dropped == 0 ? missing : missing - 1 + dropped;
    batch.clear();
    lock.lock();
    dropped_ += lost;
  }
}

}  // namespace sluice::server
