#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/http/tls_context.hpp"
#include "tests/runtime/server/endpoint_fixture.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::IsEmpty;

class tls_endpoint : public endpoint_test {
 protected:
  tls_endpoint() : endpoint_test(transport::tls) {}

  /// A connection that does not say a word of TLS by itself.
  http_client plain_client() {
    open();
    return http_client{endpoint_->port()};
  }
};

/// Of one handshake: what ALPN has agreed on, and whose certificate was shown; nothing if there was none.
struct agreed {
  std::string protocol, version, serial;
};
std::optional<agreed> shake(std::uint16_t port, std::function<void(SSL_CTX*)> const& set_up) {
  std::unique_ptr<SSL_CTX, decltype(&::SSL_CTX_free)> const context{
      ::SSL_CTX_new(::TLS_client_method()), &::SSL_CTX_free};
  set_up(context.get());
  std::unique_ptr<BIO, decltype(&::BIO_free_all)> const bio{::BIO_new_ssl_connect(context.get()),
                                                            &::BIO_free_all};
  ::BIO_set_conn_hostname(bio.get(), fmt::format("127.0.0.1:{}", port).c_str());
  if (::BIO_do_handshake(bio.get()) != 1) return std::nullopt;
  SSL* ssl = nullptr;
  ::BIO_get_ssl(bio.get(), &ssl);
  unsigned char const* name = nullptr;
  unsigned length = 0;
  ::SSL_get0_alpn_selected(ssl, &name, &length);
  std::unique_ptr<X509, decltype(&::X509_free)> const shown{::SSL_get1_peer_certificate(ssl),
                                                            &::X509_free};
  auto const* const serial = ::X509_get0_serialNumber(shown.get());
  return agreed{{reinterpret_cast<char const*>(name), length},
                ::SSL_get_version(ssl),
                {reinterpret_cast<char const*>(::ASN1_STRING_get0_data(serial)),
                 static_cast<std::size_t>(::ASN1_STRING_length(serial))}};
}
void no_wishes(SSL_CTX* /*context*/) {}

TEST_F(tls_endpoint, speaks_tls_1_2_and_newer) {
  open();
  auto const with = [&](int version) {
    return shake(endpoint_->port(), [version](SSL_CTX* context) {
      ::SSL_CTX_set_security_level(context, 0);
      ::SSL_CTX_set_min_proto_version(context, TLS1_VERSION);
      ::SSL_CTX_set_max_proto_version(context, version);
    });
  };
  ASSERT_TRUE(with(TLS1_3_VERSION));
  EXPECT_EQ(with(TLS1_3_VERSION)->version, "TLSv1.3");
  EXPECT_EQ(with(TLS1_2_VERSION)->version, "TLSv1.2");
  EXPECT_FALSE(with(TLS1_1_VERSION));
}

TEST_F(tls_endpoint, agrees_on_http_1_1_and_nothing_else) {
  open();
  auto const offering = [&](std::string const& names) {
    return shake(endpoint_->port(), [names](SSL_CTX* context) {
      ::SSL_CTX_set_alpn_protos(context, reinterpret_cast<unsigned char const*>(names.data()),
                                static_cast<unsigned>(names.size()));
    });
  };
  ASSERT_TRUE(offering("\x02h2\x08http/1.1"));
  EXPECT_EQ(offering("\x02h2\x08http/1.1")->protocol, "http/1.1");
  EXPECT_FALSE(offering("\x02h2"));
  EXPECT_THAT(shake(endpoint_->port(), no_wishes)->protocol, IsEmpty());
}

TEST_F(tls_endpoint, a_client_without_tls_is_told_so) {
  auto connection = plain_client();
  connection.request("GET", "/v2/health/live");
  auto const response = connection.read_response();
  EXPECT_EQ(response.status, 400);
  EXPECT_THAT(error_in(response), HasSubstr("https"));
  connection.finish_sending();
  EXPECT_TRUE(connection.ended());
}

TEST_F(tls_endpoint, a_handshake_that_is_none_ends) {
  auto connection = plain_client();
  connection.send(std::string_view{"\x16\x03\x01\0\7rubbish", 12});
  connection.read_until("\x15\x03");  // an alert
  connection.finish_sending();
  await_connections(0);
}

TEST_F(tls_endpoint, a_handshake_that_does_not_come_or_stalls_ends_and_stops_nobody) {
  options_.handshake_timeout = 3s;
  options_.threads = 1;
  auto silent = plain_client();
  auto stalling = plain_client();
  stalling.send("\x16\x03\x01");
  EXPECT_EQ(once("GET", "/v2/health/live").status, 200);
  EXPECT_TRUE(silent.ended());
  EXPECT_TRUE(stalling.ended());
  await_connections(0);
}

TEST_F(tls_endpoint, connections_without_a_handshake_make_room) {
  options_.max_connections = 2;
  auto first = plain_client();
  auto second = plain_client();
  await_connections(2);
  EXPECT_EQ(once("GET", "/v2/health/live").status, 200);
  EXPECT_TRUE(first.ended());
}

TEST_F(tls_endpoint, a_client_that_leaves_in_a_handshake_breaks_nothing) {
  for (auto const* const part : {"", "\x16", "\x16\x03\x01"}) {
    auto connection = plain_client();
    connection.send(part);
    connection.vanish();
    auto polite = plain_client();
    polite.send(part);
    polite.finish_sending();
  }
  await_connections(0);
  EXPECT_EQ(once("GET", "/v2/health/live").status, 200);
}

TEST_F(tls_endpoint, a_client_that_finishes_without_a_word_of_tls_gets_its_answer) {
  service_.hold();
  auto connection = client();
  connection.request("POST", "/v2/models/add/infer", addition(1, 2));
  service_.await_requests(1);
  connection.cut_sending();
  EXPECT_EQ(connection.read_response().status, 100);
  service_.release();
  EXPECT_EQ(sum_in(connection.read_response()), 3.0F);
  EXPECT_TRUE(connection.ended());
  EXPECT_THAT(service_.await_cancelled(0), IsEmpty());
}

TEST_F(tls_endpoint, stop_ends_who_has_not_shaken_hands) {
  auto silent = plain_client();
  await_connections(1);
  endpoint_->stop(long_time);
  EXPECT_TRUE(silent.ended());
}

TEST_F(tls_endpoint, a_new_certificate_is_shown_to_new_connections) {
  own_certificate const first, second;
  options_.security = std::make_shared<endpoint_security>(first.files());
  auto connection = client();
  auto const before = shake(endpoint_->port(), no_wishes)->serial;
  first.certificate.write(second.certificate.text());
  EXPECT_FALSE(options_.security->reload());  // its key is another's
  EXPECT_EQ(shake(endpoint_->port(), no_wishes)->serial, before);
  first.key.write(second.key.text());
  EXPECT_TRUE(options_.security->reload());
  EXPECT_NE(shake(endpoint_->port(), no_wishes)->serial, before);
  connection.request("GET", "/v2/health/live");
  EXPECT_EQ(connection.read_response().status, 200);
}

TEST_F(tls_endpoint, a_file_that_cannot_be_used_keeps_no_other_from_being_read_again) {
  own_certificate const first, second;
  written_file const tokens{"tokens", "old\n"};
  auto files = first.files();
  files.tokens = tokens.path();
  endpoint_security security{files};
  auto const allows = [&](char const* token) { return security.current()->tokens->allow(token); };
  auto const certificate = security.current()->tls;

  first.certificate.write(second.certificate.text());  // its key is another's
  tokens.write("new\n");
  EXPECT_FALSE(security.reload());
  EXPECT_TRUE(allows("Bearer new") && !allows("Bearer old"));
  EXPECT_EQ(security.current()->tls, certificate);

  first.key.write(second.key.text());
  tokens.write("no token\n");
  EXPECT_FALSE(security.reload());
  EXPECT_TRUE(allows("Bearer new"));
  EXPECT_NE(security.current()->tls, certificate);
}

std::string encrypted(own_certificate const& of) {
  written_file const made{"encrypted.pem", ""};
  auto const words = fmt::format("openssl pkey -aes256 -passout pass:x -in {} -out {}",
                                 of.key.path().string(), made.path().string());
  EXPECT_EQ(std::system(words.c_str()), 0);
  return made.text();
}

TEST(tls_context, what_is_wrong_with_its_files_is_told_with_the_path) {
  own_certificate const made, other;
  auto const said = [&] {
    auto const failure = thrown_by(
        [&] { static_cast<void>(read_tls_context(made.certificate.path(), made.key.path())); });
    return failure ? std::string{failure->what()} : std::string{};
  };
  EXPECT_EQ(said(), "");
  auto const key_is = [&](char const* what) {
    return HasSubstr("server.tls.key_file: " + made.key.path().string() + ": " + what);
  };
  auto const certificate_is = [&](char const* what) {
    return HasSubstr("server.tls.certificate_file: " + made.certificate.path().string() + ": " +
                     what);
  };
  auto const key = made.key.text(), certificate = made.certificate.text();
  made.key.write(other.key.text());
  EXPECT_THAT(said(), key_is("the key is not that of the certificate in "));
  made.key.write(encrypted(other));
  EXPECT_THAT(said(), key_is("the key is encrypted"));
  made.key.write(certificate);
  EXPECT_THAT(said(), key_is("holds no private key"));
  made.key.write("");
  EXPECT_THAT(said(), key_is("holds no private key"));
  made.key.write(key, std::filesystem::perms{0644});
  EXPECT_THAT(said(), key_is("its mode is 0644"));
  std::filesystem::remove(made.key.path());
  EXPECT_THAT(said(), key_is("there is no such file"));
  made.key.write(key);
  for (auto const& wrong : {std::string{}, key, certificate.substr(0, certificate.size() / 2)}) {
    made.certificate.write(wrong);
    EXPECT_THAT(said(), certificate_is("holds no certificate"));
  }
  made.certificate.write(certificate, std::filesystem::perms{0644});  // which everybody may read
  EXPECT_EQ(said(), "");
}

TEST(tls_context, a_certificate_out_of_its_time_is_warned_of) {
  own_certificate const made;
  auto const warnings = [&] {
    return read_tls_context(made.certificate.path(), made.key.path())->warnings;
  };
  EXPECT_THAT(warnings(), IsEmpty());
  auto const path = made.certificate.path().string();
  auto const words =
      fmt::format("openssl x509 -in {} -signkey {} -days -1 -out {}.old && mv {}.old {}", path,
                  made.key.path().string(), path, path, path);
  ASSERT_EQ(std::system(words.c_str()), 0);
  EXPECT_THAT(warnings(), testing::ElementsAre(HasSubstr("the certificate has expired at 20")));
}

}  // namespace
}  // namespace sluice::server
