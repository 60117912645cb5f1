#include "runtime/server/http/endpoint_security.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <string_view>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/secret_file.hpp"
#include "runtime/server/http/tls_context.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

constexpr auto const* token_key = "server.token_file";

std::optional<access_tokens> read_tokens(security_files const& files) {
  if (files.tokens.empty()) return std::nullopt;
  auto const text = read_secret_file(files.tokens, token_key);
  try {
    return access_tokens::parse(text);
  } catch (error const& wrong) {
    throw error{wrong.kind(),
                fmt::format("{}: {}: {}", token_key, files.tokens.string(), wrong.what())};
  }
}

std::shared_ptr<tls_context> read_tls(security_files const& files) {
  if (files.certificate.empty()) return nullptr;
  auto result = read_tls_context(files.certificate, files.key);
  for (auto const& each : result->warnings) {
    spdlog::warn("clients will refuse the endpoint reason={}", telemetry::quoted(each));
  }
  return result;
}

/// False if what is read cannot be used: then `into` stays as it is.
template <typename Value, typename Read>
bool replace(Value& into, Read const& read, std::string_view what) {
  try {
    into = read();
    return true;
  } catch (error const& wrong) {
    spdlog::error("the endpoint keeps the {} that it has reason={}", what,
                  telemetry::quoted(wrong.what()));
    return false;
  }
}

}  // namespace

endpoint_security::endpoint_security(security_files files)
    : files_(std::move(files)), read_(look()), seen_(read_) {
  current_ = std::make_shared<security_state const>(
      security_state{.tokens = read_tokens(files_), .tls = read_tls(files_)});
}

std::shared_ptr<security_state const> endpoint_security::current() const {
  std::lock_guard const lock{mutex_};
  return current_;
}

bool endpoint_security::reload() {
  auto const now = look();
  auto fresh = std::make_shared<security_state>(*current());
  bool const has_tokens = replace(
      fresh->tokens, [&] { return read_tokens(files_); }, "tokens");
  bool const has_tls = replace(
      fresh->tls, [&] { return read_tls(files_); }, "certificate");
  {
    std::lock_guard const lock{mutex_};
    current_ = std::move(fresh);
    read_ = seen_ = now;
  }
  if (has_tokens && has_tls) {
    spdlog::info("the endpoint has read its tokens and its certificate again");
  }
  return has_tokens && has_tls;
}

void endpoint_security::reload_if_changed() {
  auto now = look();
  {
    std::lock_guard const lock{mutex_};
    bool const is_at_rest = now == seen_;
    seen_ = std::move(now);
    if (!is_at_rest || seen_ == read_) return;
  }
  reload();
}

endpoint_security::stamps endpoint_security::look() const {
  stamps result;
  for (auto const* const file : {&files_.tokens, &files_.certificate, &files_.key}) {
    struct stat about {};
    if (!file->empty()) static_cast<void>(::stat(file->c_str(), &about));
    result.push_back({static_cast<std::int64_t>(about.st_dev),
                      static_cast<std::int64_t>(about.st_ino), about.st_size, about.st_mtim.tv_sec,
                      about.st_mtim.tv_nsec, about.st_ctim.tv_sec, about.st_ctim.tv_nsec});
  }
  return result;
}

}  // namespace sluice::server
