#include "runtime/gate/find_driver.hpp"

#include <dlfcn.h>
#include <glob.h>
#include <sys/stat.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>

namespace sluice::gate {
namespace {

constexpr std::string_view driver_name = "libcuda.so.1";
constexpr std::string_view usual_directories[] = {
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/wsl/lib",
    "/usr/lib/nvidia",
    "/usr/lib",
};

struct suggestion {
  std::mutex lock;
  std::string path;  // guarded by lock
};

suggestion& the_suggestion() {
  static suggestion one;
  return one;
}

bool same_file(struct stat const& a, struct stat const& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

class candidate_list {
 public:
  candidate_list() { knows_itself_ = ::stat(own_path().c_str(), &itself_) == 0; }

  void add_file(std::string path) {
    struct stat found {};
    if (::stat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) {
      return;
    }
    if (knows_itself_ && same_file(found, itself_)) {
      return;
    }
    for (struct stat const& known : seen_) {
      if (same_file(found, known)) {
        return;
      }
    }
    seen_.push_back(found);
    paths_.push_back(std::move(path));
  }

  void add_directory(std::string_view directory) {
    if (!directory.empty()) {
      add_file(std::string{directory} + '/' + std::string{driver_name});
    }
  }

  [[nodiscard]] std::vector<std::string> take() { return std::move(paths_); }

 private:
  struct stat itself_ {};
  bool knows_itself_ = false;
  std::vector<struct stat> seen_;
  std::vector<std::string> paths_;
};

void add_search_path(candidate_list& list, std::string_view directories) {
  while (!directories.empty()) {
    std::size_t const end = directories.find(':');
    list.add_directory(directories.substr(0, end));
    directories = end == std::string_view::npos ? std::string_view{} : directories.substr(end + 1);
  }
}

// The C library's files: C++ streams would bring their start-up code into every process of the job.
void add_configured(candidate_list& list, char const* file) {
  std::unique_ptr<FILE, int (*)(FILE*)> const lines{std::fopen(file, "re"), &std::fclose};
  std::array<char, 4096> buffer{};
  while (lines != nullptr &&
         std::fgets(buffer.data(), static_cast<int>(buffer.size()), lines.get()) != nullptr) {
    std::string_view const line{buffer.data()};
    if (line.starts_with('/')) {
      list.add_directory(line.substr(0, line.find_last_not_of(" \t\r\n") + 1));
    }
  }
}

}  // namespace

std::string own_path() {
  Dl_info info{};
  return ::dladdr(reinterpret_cast<void*>(&own_path), &info) != 0 && info.dli_fname != nullptr
             ? info.dli_fname
             : "";
}

void suggest_driver(char const* path) {
  suggestion& one = the_suggestion();
  std::lock_guard const guard{one.lock};
  if (one.path.empty()) {
    one.path = path;
  }
}

std::vector<std::string> driver_candidates() {
  candidate_list list;
  if (char const* named = std::getenv("SLUICE_REAL_LIBCUDA"); named != nullptr && *named != '\0') {
    list.add_file(named);
    return list.take();
  }
  if (char const* path = std::getenv("LD_LIBRARY_PATH"); path != nullptr) {
    add_search_path(list, path);
  }
  add_configured(list, "/etc/ld.so.conf");
  glob_t fragments{};
  if (::glob("/etc/ld.so.conf.d/*.conf", 0, nullptr, &fragments) == 0) {
    for (std::size_t i = 0; i < fragments.gl_pathc; ++i) {
      add_configured(list, fragments.gl_pathv[i]);
    }
  }
  ::globfree(&fragments);
  for (std::string_view directory : usual_directories) {
    list.add_directory(directory);
  }
  suggestion& one = the_suggestion();
  std::lock_guard const guard{one.lock};
  if (!one.path.empty()) {
    list.add_file(one.path);
  }
  return list.take();
}

}  // namespace sluice::gate
