#include "runtime/server/hosting/image_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <system_error>

#include "memhandover/base/error.hpp"

namespace sluice::server {
namespace {

constexpr std::size_t piece_bytes = std::size_t{8} << 20U;

std::string text_of(int code) {
  return std::generic_category().message(code);
}

memhandover::unique_fd open_unnamed(std::string const& folder) {
  memhandover::unique_fd file{::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)};
  if (!file) {  // not every file system has O_TMPFILE
    std::string path = folder + "/sluice-weights-XXXXXX";
    file.reset(::mkostemp(path.data(), O_CLOEXEC));
    if (file) {
      ::unlink(path.c_str());
    }
  }
  return file;
}

}  // namespace

image_file::image_file() {
  char const* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') {
    file_ = open_unnamed(cache);
  }
  if (!file_) {
    file_ = open_unnamed("/var/tmp");
  }
  if (!file_) {
    throw error{
        error_kind::unavailable,
        fmt::format(
            "no temporary file for weights can be made in $XDG_CACHE_HOME or /var/tmp: {}; set "
            "XDG_CACHE_HOME to a folder that can be written to",
            text_of(errno))};
  }
}

std::uint64_t image_file::append(std::span<std::byte const> bytes) {
  std::uint64_t const offset =
      (bytes_ + weight_alignment - 1) / weight_alignment * weight_alignment;
  std::uint64_t done = 0;
  while (done < bytes.size()) {
    auto const written = ::pwrite(file_.get(), bytes.data() + done,
                                  std::min<std::uint64_t>(bytes.size() - done, piece_bytes),
                                  static_cast<off_t>(offset + done));
    if (written < 0) {
      if (errno == EINTR) {
        continue;
      }
      throw error{
          errno == ENOSPC || errno == EDQUOT ? error_kind::out_of_memory : error_kind::internal,
          fmt::format(
              "writing the weights to a temporary file failed: {}; set XDG_CACHE_HOME to a folder "
              "with more room",
              text_of(errno))};
    }
    done += static_cast<std::uint64_t>(written);
  }
  bytes_ = offset + bytes.size();
  return offset;
}

void image_file::read(std::uint64_t offset, std::uint64_t count, std::byte* to) const {
  std::uint64_t done = 0;
  while (done < count) {
    auto const got =
        ::pread(file_.get(), to + done, std::min<std::uint64_t>(count - done, piece_bytes),
                static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      throw error{error_kind::internal,
                  fmt::format("reading the weights from their temporary file failed: {}",
                              got == 0 ? "it ends too early" : text_of(errno))};
    }
    done += static_cast<std::uint64_t>(got);
  }
}

}  // namespace sluice::server
