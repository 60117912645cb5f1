// Of a program that is built without gRPC's library.

#include "memhandover/base/error.hpp"
#include "runtime/server/grpc/grpc_endpoint.hpp"

namespace sluice::server {

class grpc_endpoint::impl {};

void grpc_endpoint::require() {
  throw error{
      error_kind::unsupported,
      "server.grpc_port: this sluice-server was built without gRPC, since libgrpc++-dev was "
      "not installed; install it and build again, or remove the key and ask over HTTP"};
}

grpc_endpoint::grpc_endpoint(grpc_options /*options*/, inference_service& /*service*/) {
  require();
}
grpc_endpoint::~grpc_endpoint() = default;

std::uint16_t grpc_endpoint::port() const noexcept {
  return 0;
}
std::string grpc_endpoint::address() const {
  return {};
}
std::size_t grpc_endpoint::calls() const {
  return 0;
}
void grpc_endpoint::stop(std::chrono::milliseconds /*grace*/) {}

}  // namespace sluice::server
