/// What tests of the endpoint share.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "runtime/server/http/endpoint.hpp"
#include "runtime/server/http/endpoint_security.hpp"
#include "tests/runtime/server/adding_service.hpp"
#include "tests/runtime/server/http_client.hpp"

namespace sluice::server {

inline constexpr std::chrono::minutes long_time{1};

inline std::string addition(float a, float b) {
  using nlohmann::json;
  return json{{"id", "r"},
              {"inputs",
               {{{"name", "a"}, {"datatype", "FP32"}, {"shape", {1}}, {"data", {a}}},
                {{"name", "b"}, {"datatype", "FP32"}, {"shape", {1}}, {"data", {b}}}}}}
      .dump();
}
/// 1 + 2, in a body that is read like a large one.
inline std::string large_addition() {
  auto body = addition(1, 2);
  body.resize(256 << 10U, ' ');
  return body;
}
inline float sum_in(client_response const& response) {
  return nlohmann::json::parse(response.body)["outputs"][0]["data"][0];
}
inline std::string error_in(client_response const& response) {
  return nlohmann::json::parse(response.body).at("error");
}

/// A file of this test's own.
class written_file {
 public:
  written_file(std::string_view name, std::string_view text)
      : path_(std::filesystem::path{testing::TempDir()} /
              (std::to_string(::getpid()) + "-" + std::to_string(next_++) + "-" +
               std::string{name})) {
    write(text);
  }
  written_file(written_file const&) = delete;
  written_file& operator=(written_file const&) = delete;
  written_file(written_file&&) = delete;
  written_file& operator=(written_file&&) = delete;
  ~written_file() { std::filesystem::remove(path_); }

  void write(std::string_view text,
             std::filesystem::perms mode = std::filesystem::perms::owner_read |
                                           std::filesystem::perms::owner_write) const {
    std::ofstream{path_} << text;
    std::filesystem::permissions(path_, mode);
  }
  [[nodiscard]] std::filesystem::path const& path() const { return path_; }
  [[nodiscard]] std::string text() const {
    std::ifstream stream{path_};
    return {std::istreambuf_iterator<char>{stream}, {}};
  }

 private:
  static inline std::atomic<int> next_{0};
  std::filesystem::path path_;
};

/// A key, and a certificate of it for localhost.
struct own_certificate {
  own_certificate() {
    auto const made =
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "
        "/CN=localhost "
        "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -days 2 -keyout " +
        key.path().string() + " -out " + certificate.path().string() + " 2>&1";
    std::string said;
    std::unique_ptr<FILE, decltype(&::pclose)> const run{::popen(made.c_str(), "r"), &::pclose};
    for (int c = 0; (c = std::fgetc(run.get())) != EOF;) said += static_cast<char>(c);
    if (certificate.text().empty()) throw std::runtime_error{said};
  }
  [[nodiscard]] security_files files() const { return {{}, certificate.path(), key.path()}; }

  written_file certificate{"certificate.pem", ""}, key{"key.pem", ""};
};

class endpoint_test : public testing::Test {
 protected:
  explicit endpoint_test(transport over) : over_(over) {
    options_.port = 0;
    if (over_ == transport::tls) {
      static own_certificate const shown;
      options_.security = std::make_shared<endpoint_security>(shown.files());
    }
  }

  void open() {
    if (!endpoint_) endpoint_ = std::make_unique<endpoint>(options_, service_);
  }
  http_client client() {
    open();
    return http_client{endpoint_->port(), over_};
  }
  client_response once(std::string_view method, std::string_view target, std::string_view body = {},
                       std::string_view headers = {}) {
    auto connection = client();
    connection.request(method, target, body, headers);
    return connection.read_response();
  }
  /// A client whose large request keeps the one thread that reads such bodies, until `service_` holds no lookups any more.
  http_client keep_others_bodies_waiting(std::string_view body) {
    options_.body_threads = 1;
    service_.hold_lookups_of("cold");
    auto first = client();
    first.request("POST", "/v2/models/cold/infer", body);
    service_.await_held_lookup();
    return first;
  }
  /// Blocks until the server holds `count` connections.
  void await_connections(std::size_t count) const {
    auto const end = std::chrono::steady_clock::now() + long_time;
    while (endpoint_->connections() != count) {
      ASSERT_LT(std::chrono::steady_clock::now(), end)
          << endpoint_->connections() << " connections";
      std::this_thread::yield();
    }
  }

  transport const over_;
  endpoint_options options_;
  adding_service service_;
  std::unique_ptr<endpoint> endpoint_;
};

/// Tests of what holds under TLS as it does without.
class http_endpoint : public endpoint_test, public testing::WithParamInterface<transport> {
 protected:
  http_endpoint() : endpoint_test(GetParam()) {}
};

}  // namespace sluice::server
