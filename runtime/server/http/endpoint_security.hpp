/// Whom the endpoint answers, from files that may change while it runs.
///
///   endpoint_options options;
///   options.security =
///       std::make_shared<endpoint_security>(security_files{.tokens = "/etc/sluice/tokens"});
///   endpoint http{options, service};
///   // … and when the file has been written anew, within seconds, or at once by
///   options.security->reload();
///
/// Connections and requests that come afterwards see the new files. All members may be called from any thread.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/server/http/access_tokens.hpp"

namespace sluice::server {

struct tls_context;

/// Paths; empty: not wanted.
struct security_files {
  std::filesystem::path tokens{};
  std::filesystem::path certificate{}, key{};  ///< both or none

  [[nodiscard]] bool empty() const { return tokens.empty() && certificate.empty(); }
};

/// What stands in the files at one time.
struct security_state {
  std::optional<access_tokens> tokens;  ///< none: everybody may ask
  std::shared_ptr<tls_context> tls;     ///< null: connections are plain
};

class endpoint_security {
 public:
  /// Throws `not_found` or `invalid_argument` with file and reason.
  explicit endpoint_security(security_files files);

  [[nodiscard]] std::shared_ptr<security_state const> current() const;
  /// Reads the files again. False if one cannot be used, which is logged: then tokens, or the certificate with its key, stay as they
  /// were, whatever becomes of the others.
  bool reload();
  /// The same if they have changed, and no more since the last call: whoever writes several files has finished.
  void reload_if_changed();

 private:
  /// Device, inode, size, and when it was written and changed, of each file.
  using stamps = std::vector<std::array<std::int64_t, 7>>;
  [[nodiscard]] stamps look() const;

  security_files const files_;
  mutable std::mutex mutex_;  ///< guards what follows
  std::shared_ptr<security_state const> current_;
  stamps read_, seen_;
};

}  // namespace sluice::server
