/// The file of a model, kept open, so that what is read of it later is what it held at first: another file
/// that has taken its name since is not read, and one that has been written to is an error.
///
///   model_file file{"/models/add/1/model.pt"};
///   auto words = file.fingerprint();
///   file.read(offset, {destination, bytes});
///
/// What goes unnoticed: contents that somebody changed and then set the time of the change back, and a write
/// within the same tick of the file system's clock as the one before it was opened (some milliseconds).
///
/// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::server {

class model_file {
 public:
  /// Throws `not_found` if there is no such file, or none that can be read.
  explicit model_file(std::filesystem::path path);

  [[nodiscard]] std::filesystem::path const& path() const noexcept { return path_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return first_.bytes; }
  /// The very file in the very state, as it was opened: whoever writes to it, or puts another in its place,
  /// gives that name another fingerprint.
  [[nodiscard]] std::string fingerprint() const;

  /// Fills `to` from `offset` on. Throws `unavailable` if the contents have changed since it was opened,
  /// `internal` if it cannot be read.
  void read(std::uint64_t offset, std::span<std::byte> to) const;
  /// How many bytes have been read so far.
  [[nodiscard]] std::uint64_t read_bytes() const noexcept { return read_; }

 private:
  struct state {
    std::uint64_t device = 0, inode = 0, bytes = 0;
    std::int64_t modified_s = 0, modified_ns = 0, changed_s = 0, changed_ns = 0;
  };

  [[nodiscard]] state look() const;
  void check_unchanged() const;

  std::filesystem::path path_;
  memhandover::unique_fd file_;
  state first_;
  mutable std::atomic<std::uint64_t> read_ = 0;
};

}  // namespace sluice::server
