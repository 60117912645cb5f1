#include "runtime/server/http/tls_context.hpp"

#include <fmt/format.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <array>
#include <boost/asio/buffer.hpp>
#include <string_view>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/secret_file.hpp"

namespace sluice::server {
namespace {

namespace net = boost::asio;

/// As ALPN has it.
constexpr std::array<unsigned char, 9> protocol{8, 'h', 't', 't', 'p', '/', '1', '.', '1'};

constexpr auto const* certificate_key = "server.tls.certificate_file";
constexpr auto const* key_key = "server.tls.key_file";

[[noreturn]] void refuse(char const* of, std::filesystem::path const& file, std::string_view why) {
  throw error{error_kind::invalid_argument, fmt::format("{}: {}: {}", of, file.string(), why)};
}

/// What ALPN asks for: HTTP/1.1, if anything.
int choose_protocol(SSL* /*of*/, unsigned char const** chosen, unsigned char* length,
                    unsigned char const* offered, unsigned bytes, void* /*none*/) {
  unsigned char* found = nullptr;
  if (::SSL_select_next_proto(&found, length, protocol.data(), protocol.size(), offered, bytes) !=
      OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  }
  *chosen = found;
  return SSL_TLSEXT_ERR_OK;
}

std::string text_of(ASN1_TIME const* time) {
  tm utc{};
  if (::ASN1_TIME_to_tm(time, &utc) != 1) return "?";
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1,
                     utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec);
}

std::vector<std::string> warnings_of(X509 const* certificate, std::filesystem::path const& file) {
  std::vector<std::string> result;
  auto const* const from = ::X509_get0_notBefore(certificate);
  auto const* const until = ::X509_get0_notAfter(certificate);
  auto const warn = [&](std::string_view what, ASN1_TIME const* when) {
    result.push_back(fmt::format("{}: {}: the certificate {} {}", certificate_key, file.string(),
                                 what, text_of(when)));
  };
  if (::X509_cmp_current_time(until) < 0) warn("has expired at", until);
  if (::X509_cmp_current_time(from) > 0) warn("is not valid before", from);
  return result;
}

}  // namespace

std::shared_ptr<tls_context> read_tls_context(std::filesystem::path const& certificate_file,
                                              std::filesystem::path const& key_file) {
  auto result = std::make_shared<tls_context>();
  auto& native = result->native;
  auto* const handle = native.native_handle();
  ::SSL_CTX_set_min_proto_version(handle, TLS1_2_VERSION);
  ::SSL_CTX_set_options(handle, SSL_OP_NO_RENEGOTIATION);
  ::SSL_CTX_set_mode(handle, SSL_MODE_RELEASE_BUFFERS);  // of connections that rest
  ::SSL_CTX_set_alpn_select_cb(handle, choose_protocol, nullptr);

  boost::system::error_code failure;
  auto const chain = read_public_file(certificate_file, certificate_key);
  native.use_certificate_chain(net::buffer(chain), failure);
  if (failure) {
    refuse(certificate_key, certificate_file,
           fmt::format("holds no certificate in PEM's form: {}", failure.message()));
  }
  auto const key = read_secret_file(key_file, key_key);
  bool is_encrypted = false;
  native.set_password_callback([&](std::size_t, net::ssl::context::password_purpose) {
    is_encrypted = true;
    return std::string{};
  });
  native.use_private_key(net::buffer(key), net::ssl::context::pem, failure);
  native.set_password_callback(
      [](std::size_t, net::ssl::context::password_purpose) { return std::string{}; });
  if (is_encrypted) {
    refuse(key_key, key_file,
           "the key is encrypted, and there is nobody to ask for its passphrase; store it without "
           "one, such as `openssl pkey` writes it");
  }
  // OpenSSL compares the key with the certificate that it has.
  if (failure && ::SSL_CTX_get0_privatekey(handle) == nullptr &&
      failure.message().find("mismatch") == std::string::npos) {
    refuse(key_key, key_file,
           fmt::format("holds no private key in PEM's form: {}", failure.message()));
  }
  if (failure || ::SSL_CTX_check_private_key(handle) != 1) {
    refuse(key_key, key_file,
           fmt::format("the key is not that of the certificate in {}", certificate_file.string()));
  }
  result->warnings = warnings_of(::SSL_CTX_get0_certificate(handle), certificate_file);
  return result;
}

}  // namespace sluice::server
