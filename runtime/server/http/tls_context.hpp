/// With what the endpoint shows that it is the one that is meant: a certificate and its key.
#pragma once

#include <boost/asio/ssl/context.hpp>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace sluice::server {

struct tls_context {
  boost::asio::ssl::context native{boost::asio::ssl::context::tls_server};
  std::vector<std::string> warnings;  ///< what clients will not like
};

/// TLS 1.2 and newer, HTTP/1.1 alone. Throws `not_found` or `invalid_argument` with file and reason.
[[nodiscard]] std::shared_ptr<tls_context> read_tls_context(
    std::filesystem::path const& certificate_file, std::filesystem::path const& key_file);

}  // namespace sluice::server
