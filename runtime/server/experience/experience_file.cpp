#include "runtime/server/experience/experience_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/inference/background_thread.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using memhandover::reason_of;
using memhandover::unique_fd;
using std::chrono::milliseconds;

/// Of the time that writing takes.
constexpr int longest_pause_factor = 100;

error cannot(char const* what, int reason) {
  return {error_kind::unavailable, fmt::format("{}: {}", what, reason_of(reason))};
}

/// Nothing: there is no file. What is none, such as a pipe, is not waited for.
std::optional<std::string> read_file(std::filesystem::path const& path) {
  unique_fd const file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW)};
  if (!file) {
    if (errno == ENOENT) {
      return std::nullopt;
    }
    throw cannot("it cannot be opened", errno);
  }
  struct stat is {};
  if (::fstat(file.get(), &is) != 0 || !S_ISREG(is.st_mode)) {
    throw error{error_kind::invalid_argument, "it is no file"};
  }
  if (static_cast<std::uintmax_t>(is.st_size) > experience_file::most_bytes) {
    throw error{error_kind::invalid_argument, fmt::format("it has {} bytes, more than {}",
                                                          is.st_size, experience_file::most_bytes)};
  }
  std::string text(static_cast<std::size_t>(is.st_size), '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    auto const got = ::read(file.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno != EINTR) {
      throw cannot("it cannot be read", errno);
    }
    if (got == 0) {
      break;
    }
    done += static_cast<std::size_t>(std::max<ssize_t>(got, 0));
  }
  text.resize(done);
  return text;
}

void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    auto const written = ::write(file, text.data(), text.size());
    if (written < 0 && errno != EINTR) {
      throw cannot("it cannot be written", errno);
    }
    text.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(written, 0)));
  }
}

void replace_file(std::filesystem::path const& path, std::string_view text) {
  auto const draft = path.string() + ".new";
  unique_fd const file{::open(
      draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0600)};
  if (!file) {
    throw cannot("no file can be made beside it", errno);
  }
  write_all(file.get(), text);
  if (std::rename(draft.c_str(), path.c_str()) != 0) {
    throw cannot("it cannot be replaced", errno);
  }
}

}  // namespace

class experience_file::writer {
 public:
  writer(std::filesystem::path path, milliseconds pause)
      : path_(std::move(path)), pause_(pause), next_(clock::now() + pause) {
    thread_ = std::thread{[this] {
      ::pthread_setname_np(::pthread_self(), "sluice-learnt");
      give_way();
      work();
    }};
  }
  writer(writer const&) = delete;
  writer& operator=(writer const&) = delete;
  writer(writer&&) = delete;
  writer& operator=(writer&&) = delete;
  ~writer() {
    {
      std::lock_guard const lock{mutex_};
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  [[nodiscard]] bool is_due(clock::time_point now) const {
    std::lock_guard const lock{mutex_};
    return !waiting_ && !writes_ && now >= next_;
  }
  void put(std::vector<model_experience> all) {
    std::lock_guard const lock{mutex_};
    waiting_ = experiences{std::chrono::system_clock::now(), std::move(all)};
    changed_.notify_all();
  }
  void finish() {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [this] { return !waiting_ && !writes_; });
  }

 private:
  void work() {
    std::unique_lock lock{mutex_};
    for (;;) {
      changed_.wait(lock, [this] { return waiting_ || ended_; });
      if (!waiting_) {
        return;
      }
      auto const all = *std::exchange(waiting_, std::nullopt);
      writes_ = true;
      lock.unlock();
      auto const began = clock::now();
      write(all);
      auto const end = clock::now();
      lock.lock();
      writes_ = false;
      next_ = end + std::max<clock::duration>(pause_, longest_pause_factor * (end - began));
      changed_.notify_all();
    }
  }

  void write(experiences const& all) noexcept {
    try {
      replace_file(path_, text_of(all));
      fails_ = false;
    } catch (std::exception const& failure) {
      if (!std::exchange(fails_, true)) {  // once, until it does not
        spdlog::warn(
            "what has been learnt of models is not kept for the next server file={} reason={}",
            telemetry::quoted(path_.string()), telemetry::quoted(failure.what()));
      }
    }
  }

  std::filesystem::path const path_;
  milliseconds const pause_;
  bool fails_ = false;  ///< the thread's
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  clock::time_point next_;  ///< guarded, as what follows
  std::optional<experiences> waiting_{};
  bool writes_ = false;
  bool ended_ = false;
  std::thread thread_;
};

experience_file::experience_file(std::filesystem::path path, milliseconds pause) {
  try {
    if (auto const text = read_file(path)) {
      auto all = read_experiences(*text);
      saved_at_ = all.saved_at;
      for (auto& each : all.models) {
        auto name = each.model;
        left_.insert_or_assign(std::move(name), std::move(each));
      }
    }
  } catch (std::exception const& failure) {
    spdlog::warn("what an earlier server has learnt of models is not used file={} reason={}",
                 telemetry::quoted(path.string()), telemetry::quoted(failure.what()));
  }
  writer_ = std::make_unique<writer>(std::move(path), pause);
}

experience_file::~experience_file() = default;

std::optional<experience_file::found> experience_file::find(std::string const& model,
                                                            std::string const& stands_for) const {
  auto const its = left_.find(model);
  if (its == left_.end() || its->second.stands_for != stands_for) {
    return std::nullopt;
  }
  scheduler::seconds const age = std::chrono::system_clock::now() - saved_at_;
  return found{its->second.learnt, std::max(scheduler::seconds{0.0}, age)};
}

bool experience_file::is_due(clock::time_point now) const {
  return writer_->is_due(now);
}

void experience_file::keep(std::vector<model_experience> all) {
  writer_->put(std::move(all));
}

void experience_file::finish() {
  writer_->finish();
}

}  // namespace sluice::server
