/// A client's end of an HTTP connection, byte by byte: it sends whatever it is told, also what no
/// client should, under TLS if it is to. Every wait ends after 60 s with an exception.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::server {

struct client_response {
  int status = 0;
  std::map<std::string, std::string> headers;
  std::string body;
};

enum class transport { plain, tls };

class http_client {
 public:
  explicit http_client(std::uint16_t port, transport over = transport::plain)
      : socket_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)} {
    timeval const limit{60, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(socket_.get(), reinterpret_cast<sockaddr const*>(&address), sizeof(address)) !=
        0) {
      throw std::runtime_error{std::string{"connect: "} + std::strerror(errno)};
    }
    if (over == transport::tls) begin_tls();
  }

  /// False when the server does not take it any more.
  bool try_send(std::string_view bytes) {
    while (!bytes.empty()) {
      auto const sent = tls_ ? ::SSL_write(tls_.get(), bytes.data(), static_cast<int>(bytes.size()))
                             : ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }
  void send(std::string_view bytes) {
    if (!try_send(bytes)) throw std::runtime_error{std::string{"send: "} + std::strerror(errno)};
  }

  void request(std::string_view method, std::string_view target, std::string_view body = {},
               std::string_view more_headers = {}) {
    std::string text{method};
    text.append(" ").append(target).append(" HTTP/1.1\r\nHost: localhost\r\n").append(more_headers);
    if (!body.empty() || method == "POST") {
      text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
    }
    send(text.append("\r\n").append(body));
  }

  client_response read_response(bool has_body = true) {
    auto const head = read_until("\r\n\r\n");
    client_response response;
    response.status = std::stoi(head.substr(head.find(' ') + 1));
    for (std::size_t at = head.find("\r\n") + 2; at < head.size() - 2;) {
      auto const end = head.find("\r\n", at);
      auto const colon = head.find(": ", at);
      response.headers[head.substr(at, colon - at)] = head.substr(colon + 2, end - colon - 2);
      at = end + 2;
    }
    if (has_body && response.headers.count("Content-Length") != 0) {
      auto const length =
          static_cast<std::size_t>(std::stoull(response.headers.at("Content-Length")));
      while (received_.size() < length) receive();
      response.body = received_.substr(0, length);
      received_.erase(0, length);
    }
    return response;
  }

  /// The one after interim answers.
  client_response read_final_response() {
    auto response = read_response();
    while (response.status < 200) response = read_response();
    return response;
  }

  std::string read_until(std::string_view end) {
    std::size_t at = 0;
    while ((at = received_.find(end)) == std::string::npos) receive();
    auto text = received_.substr(0, at + end.size());
    received_.erase(0, at + end.size());
    return text;
  }

  /// Waits for the end of the connection; false if something else came.
  bool ended() {
    if (!received_.empty()) return false;
    char byte = 0;
    errno = 0;
    if (tls_) return ::SSL_read(tls_.get(), &byte, 1) <= 0 && errno != EAGAIN;
    auto const got = ::recv(socket_.get(), &byte, 1, 0);
    return got == 0 || (got < 0 && errno == ECONNRESET);
  }

  /// Says that no more comes, as `shutdown` does.
  void finish_sending() {
    if (tls_) ::SSL_shutdown(tls_.get());
    ::shutdown(socket_.get(), SHUT_WR);
  }
  /// The same without a word of TLS about it.
  void cut_sending() { ::shutdown(socket_.get(), SHUT_WR); }

  /// Leaves as a program does that closes its connection.
  void leave() { socket_.reset(); }

  /// Leaves without a goodbye: the server sees a reset.
  void vanish() {
    linger const none{1, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &none, sizeof(none));
    socket_.reset();
  }

 private:
  void receive() {
    std::array<char, 65536> bytes{};
    auto const got = tls_ ? ::SSL_read(tls_.get(), bytes.data(), static_cast<int>(bytes.size()))
                          : ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (got <= 0) {
      throw std::runtime_error{"the server ended the connection in the middle of an answer"};
    }
    received_.append(bytes.data(), static_cast<std::size_t>(got));
  }

  /// Trusts anybody: what the server shows is for others to test.
  void begin_tls() {
    (void)std::signal(SIGPIPE, SIG_IGN);  // OpenSSL writes as to a file
    static std::unique_ptr<SSL_CTX, decltype(&::SSL_CTX_free)> const context{
        ::SSL_CTX_new(::TLS_client_method()), &::SSL_CTX_free};
    tls_.reset(::SSL_new(context.get()));
    ::SSL_set_fd(tls_.get(), socket_.get());
    if (::SSL_connect(tls_.get()) != 1) throw std::runtime_error{"no handshake"};
  }

  memhandover::unique_fd socket_;
  std::unique_ptr<SSL, decltype(&::SSL_free)> tls_{nullptr, &::SSL_free};
  std::string received_;
};

}  // namespace sluice::server
