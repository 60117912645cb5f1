#include "runtime/server/http/endpoint_security.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/secret_file.hpp"
#include "runtime/server/http/tls_context.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

constexpr auto const* token_key = "server.token_file";

security_state read(security_files const& files) {
  security_state result;
  if (!files.tokens.empty()) {
    auto const text = read_secret_file(files.tokens, token_key);
    try {
      result.tokens = access_tokens::parse(text);
    } catch (error const& wrong) {
      throw error{wrong.kind(),
                  fmt::format("{}: {}: {}", token_key, files.tokens.string(), wrong.what())};
    }
  }
  if (!files.certificate.empty()) result.tls = read_tls_context(files.certificate, files.key);
  return result;
}

void log_warnings(security_state const& state) {
  if (!state.tls) return;
  for (auto const& each : state.tls->warnings) {
    spdlog::warn("clients will refuse the endpoint reason={}", telemetry::quoted(each));
  }
}

}  // namespace

endpoint_security::endpoint_security(security_files files)
    : files_(std::move(files)), read_(look()), seen_(read_) {
  current_ = std::make_shared<security_state const>(read(files_));
  log_warnings(*current_);
}

std::shared_ptr<security_state const> endpoint_security::current() const {
  std::lock_guard const lock{mutex_};
  return current_;
}

bool endpoint_security::reload() {
  auto const now = look();
  try {
    auto fresh = std::make_shared<security_state const>(read(files_));
    log_warnings(*fresh);
    std::lock_guard const lock{mutex_};
    current_ = std::move(fresh);
    read_ = seen_ = now;
  } catch (error const& wrong) {
    spdlog::error("the endpoint keeps the tokens and the certificate that it has reason={}",
                  telemetry::quoted(wrong.what()));
    std::lock_guard const lock{mutex_};
    read_ = seen_ = now;
    return false;
  }
  spdlog::info("the endpoint has read its tokens and its certificate again");
  return true;
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
