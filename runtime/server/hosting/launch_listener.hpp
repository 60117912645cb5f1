/// Has the gate tell a lease when this process uses its device: the gate is preloaded into processes that compute for a
/// server, too.
///
///   if (launch_listener const listener{lease}; listener.listens()) {
///     // … from here on each burst of launches claims the device …
///   }
///
/// One at a time, since there is one gate.
#pragma once

#include <memory>

#include "runtime/server/hosting/compute_lease.hpp"

namespace sluice::server {

class launch_listener {
 public:
  explicit launch_listener(std::shared_ptr<compute_lease> lease);
  launch_listener(launch_listener const&) = delete;
  launch_listener& operator=(launch_listener const&) = delete;
  /// The lease is told nothing afterwards.
  ~launch_listener();

  /// False if the gate is not in this process or launches would go past it: the log says so.
  [[nodiscard]] bool listens() const noexcept { return listens_; }

 private:
  bool listens_ = false;
};

}  // namespace sluice::server
