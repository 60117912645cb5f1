#include "runtime/server/http/secret_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/unique_fd.hpp"

namespace sluice::server {
namespace {

constexpr std::size_t largest_file = std::size_t{1} << 20U;
constexpr mode_t of_others = S_IRWXG | S_IRWXO;

std::string read_file(std::filesystem::path const& file, char const* of, bool is_secret) {
  auto const refuse = [&](std::string const& why, error_kind kind = error_kind::invalid_argument) {
    throw error{kind, fmt::format("{}: {}: {}", of, file.string(), why)};
  };
  // Whoever opens a pipe would wait for somebody to write.
  memhandover::unique_fd const open{::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (!open) {
    bool const is_missing = errno == ENOENT || errno == ENOTDIR;
    refuse(is_missing ? "there is no such file; give the path of one, relative to the policy file"
                      : fmt::format("cannot be read: {}", std::strerror(errno)),
           is_missing ? error_kind::not_found : error_kind::invalid_argument);
  }
  struct stat about {};
  if (::fstat(open.get(), &about) != 0 || !S_ISREG(about.st_mode)) {
    refuse("this is no file; give the path of one");
  }
  if (is_secret && about.st_uid == ::geteuid() && (about.st_mode & of_others) != 0) {
    refuse(fmt::format("its mode is {:04o}, so that others can use it; run `chmod 600 {}`",
                       about.st_mode & 07777U, memhandover::shell_word(file.string())));
  }
  std::string text;
  std::array<char, 4096> part{};
  ssize_t got = 0;
  while ((got = ::read(open.get(), part.data(), part.size())) > 0 && text.size() <= largest_file) {
    text.append(part.data(), static_cast<std::size_t>(got));
  }
  if (got < 0) refuse(fmt::format("cannot be read: {}", std::strerror(errno)));
  if (text.size() > largest_file) refuse("is larger than 1 MiB; give the path of another file");
  return text;
}

}  // namespace

std::string read_secret_file(std::filesystem::path const& file, char const* of) {
  return read_file(file, of, true);
}

std::string read_public_file(std::filesystem::path const& file, char const* of) {
  return read_file(file, of, false);
}

}  // namespace sluice::server
