#include "nccl_shim/agreement/torch_part.hpp"

#include <dirent.h>
#include <link.h>

#include <array>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>

namespace sluice::nccl_shim {
namespace {

template <auto Close>
struct closes {
  template <typename Opened>
  void operator()(Opened* opened) const {
    Close(opened);
  }
};

/// Its first line that begins so, without that; empty if there is none.
std::string line_after(std::string const& file, std::string_view beginning) {
  std::unique_ptr<std::FILE, closes<std::fclose>> const opened{std::fopen(file.c_str(), "re")};
  std::array<char, 256> line{};
  while (opened && std::fgets(line.data(), line.size(), opened.get()) != nullptr) {
    std::string_view const found{line.data()};
    if (found.starts_with(beginning)) {
      return std::string{found.substr(beginning.size())};
    }
  }
  return {};
}

bool is_digit(char letter) {
  return std::isdigit(static_cast<unsigned char>(letter)) != 0;
}

/// "2.11" of "2.11.0+cu130"; empty if it does not begin so.
std::string minor_of(std::string_view version) {
  std::size_t at = 0;
  auto const number = [&] {
    auto const first = at;
    while (at < version.size() && is_digit(version[at])) {
      ++at;
    }
    return at > first;
  };
  bool const whole = number() && at < version.size() && version[at++] == '.' && number();
  return whole ? std::string{version.substr(0, at)} : std::string{};
}

int note_torch(dl_phdr_info* library, std::size_t /*size*/, void* into) {
  constexpr std::string_view end = "/lib/libtorch_cpu.so";
  std::string_view const name{library->dlpi_name != nullptr ? library->dlpi_name : ""};
  if (!name.ends_with(end)) {
    return 0;
  }
  *static_cast<std::string*>(into) = name.substr(0, name.size() - end.size());
  return 1;
}

}  // namespace

std::string torch_minor_in(std::string const& folder) {
  auto const of_package = minor_of(line_after(folder + "/version.py", "__version__ = '"));
  return of_package.empty() ? minor_of(line_after(folder + "/build-version", "")) : of_package;
}

std::string loaded_torch_minor() {
  std::string folder;
  ::dl_iterate_phdr(note_torch, &folder);
  return folder.empty() ? std::string{} : torch_minor_in(folder);
}

std::string torch_part(std::string const& libraries, std::string const& minor) {
  auto const parts = libraries + "/_torch";
  if (!minor.empty()) {
    return parts + '/' + minor;
  }
  std::unique_ptr<DIR, closes<::closedir>> const opened{::opendir(parts.c_str())};
  std::string only;
  while (dirent const* const entry = opened ? ::readdir(opened.get()) : nullptr) {
    if (entry->d_name[0] != '.') {
      if (!only.empty()) {
        return libraries;
      }
      only = entry->d_name;
    }
  }
  return only.empty() ? libraries : parts + '/' + only;
}

}  // namespace sluice::nccl_shim
