/// What tests of the endpoint share.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>

#include "runtime/server/http/endpoint.hpp"
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
inline float sum_in(client_response const& response) {
  return nlohmann::json::parse(response.body)["outputs"][0]["data"][0];
}
inline std::string error_in(client_response const& response) {
  return nlohmann::json::parse(response.body).at("error");
}

class http_endpoint : public testing::Test {
 protected:
  http_endpoint() { options_.port = 0; }

  http_client client() {
    if (!endpoint_) endpoint_ = std::make_unique<endpoint>(options_, service_);
    return http_client{endpoint_->port()};
  }
  client_response once(std::string_view method, std::string_view target, std::string_view body = {},
                       std::string_view headers = {}) {
    auto connection = client();
    connection.request(method, target, body, headers);
    return connection.read_response();
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

  endpoint_options options_;
  adding_service service_;
  std::unique_ptr<endpoint> endpoint_;
};

/// A file of this test's own.
class written_file {
 public:
  written_file(std::string_view name, std::string_view text)
      : path_(std::filesystem::path{testing::TempDir()} /
              (std::to_string(::getpid()) + "-" + std::string{name})) {
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

 private:
  std::filesystem::path path_;
};

}  // namespace sluice::server
