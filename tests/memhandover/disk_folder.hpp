/// A folder on a disk for a test, wherever it runs.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include "memhandover/device/disk_room.hpp"

namespace sluice::test {

/// Removed at its end. `path` is empty where none of the usual folders lies on a disk.
class disk_folder {
 public:
  disk_folder() {
    for (auto const& under : {std::filesystem::temp_directory_path(), std::filesystem::path{"."},
                              std::filesystem::path{"/var/tmp"}}) {
      auto name = std::filesystem::absolute(under / "sluice-disk-XXXXXX").string();
      if (!memhandover::refusal_of_folder(under.string()) && ::mkdtemp(name.data()) != nullptr) {
        path_ = name;
        return;
      }
    }
  }
  disk_folder(disk_folder const&) = delete;
  disk_folder& operator=(disk_folder const&) = delete;
  ~disk_folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  [[nodiscard]] std::string const& path() const noexcept { return path_; }
  [[nodiscard]] bool is_empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

}  // namespace sluice::test
