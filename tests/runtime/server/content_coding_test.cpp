#include "runtime/server/http/content_coding.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "runtime/server/http/endpoint.hpp"
#include "tests/runtime/server/adding_service.hpp"
#include "tests/runtime/server/http_client.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;
using testing::HasSubstr;

constexpr std::uint64_t plenty = std::uint64_t{1} << 30U;

std::string of_random_bytes(std::size_t size) {
  std::mt19937_64 random{20240229};
  std::string text(size, '\0');
  for (auto& c : text) c = static_cast<char>(random());
  return text;
}

TEST(content_coding, what_was_compressed_is_the_same_again) {
  for (auto const coding : {content_coding::gzip, content_coding::deflate}) {
    for (std::size_t const size : {0U, 1U, 4096U, 1'000'000U}) {
      for (auto const& text : {std::string(size, 'a'), of_random_bytes(size)}) {
        EXPECT_EQ(decompressed(compressed(text, {}, coding), coding, plenty), text) << size;
      }
    }
    auto const bytes = of_random_bytes(100'000);
    auto const* const begin = reinterpret_cast<std::byte const*>(bytes.data());
    std::vector<tensor_bytes> const tensors{
        std::vector<std::byte>(begin, begin + 70'000), std::vector<std::byte>{},
        std::vector<std::byte>(begin + 70'000, begin + 100'000)};
    EXPECT_EQ(decompressed(compressed("{}", tensors, coding), coding, plenty), "{}" + bytes);
  }
}

TEST(content_coding, streams_of_gzip_may_follow_each_other) {
  auto const first = compressed("one ", {}, content_coding::gzip);
  auto const second = compressed("two", {}, content_coding::gzip);
  EXPECT_EQ(decompressed(first + second, content_coding::gzip, plenty), "one two");
}

TEST(content_coding, a_stream_that_is_not_whole_is_an_error) {
  for (auto const coding : {content_coding::gzip, content_coding::deflate}) {
    auto const whole = compressed(std::string(1000, 'a') + "z", {}, coding);
    for (std::size_t length = 1; length < whole.size(); ++length) {
      auto const failure = thrown_by(
          [&] { static_cast<void>(decompressed(whole.substr(0, length), coding, plenty)); });
      ASSERT_TRUE(failure) << length;
      EXPECT_EQ(failure->kind(), error_kind::invalid_argument);
      EXPECT_THAT(failure->what(), HasSubstr("does not end")) << length;
    }
    auto damaged = whole;
    damaged[whole.size() - 3] ^= 1;  // of the check sum
    for (auto const& text : {damaged, whole + "x", "{}" + whole, std::string{"not compressed"}}) {
      auto const failure =
          thrown_by([&] { static_cast<void>(decompressed(text, coding, plenty)); });
      ASSERT_TRUE(failure) << text;
      EXPECT_THAT(failure->what(), HasSubstr(coding_name(coding))) << text;
    }
  }
}

TEST(content_coding, no_more_is_made_than_is_allowed) {
  for (auto const coding : {content_coding::gzip, content_coding::deflate}) {
    auto const bomb = compressed(std::string(std::size_t{64} << 20U, '\0'), {}, coding);
    EXPECT_FALSE(decompressed(bomb, coding, 1000));
    auto const exact = compressed(std::string(1000, 'a'), {}, coding);
    EXPECT_TRUE(decompressed(exact, coding, 1000));
    EXPECT_FALSE(decompressed(exact, coding, 999));
    EXPECT_TRUE(decompressed(compressed("", {}, coding), coding, 0));
  }
}

TEST(content_coding, content_encoding_names_one) {
  EXPECT_EQ(coding_of(""), content_coding::identity);
  EXPECT_EQ(coding_of("Identity"), content_coding::identity);
  EXPECT_EQ(coding_of(" GZip "), content_coding::gzip);
  EXPECT_EQ(coding_of("x-gzip"), content_coding::gzip);
  EXPECT_EQ(coding_of("deflate"), content_coding::deflate);
  for (auto const* const unknown : {"br", "gzip, gzip", "gzip,deflate", "zstd", "gzip;q=1"}) {
    EXPECT_FALSE(coding_of(unknown)) << unknown;
  }
}

TEST(content_coding, accept_encoding_is_weighed) {
  struct row {
    char const* header;
    content_coding wanted;
  };
  using enum content_coding;
  for (auto const& each :
       {row{"", identity}, row{"gzip", gzip}, row{"deflate", deflate}, row{"deflate, gzip", gzip},
        row{"gzip;q=0.4, deflate;q=0.5", deflate}, row{"gzip;q=0", identity},
        row{"gzip;q=0.000, deflate", deflate}, row{"*", gzip}, row{"gzip;q=0, *", deflate},
        row{"br, zstd", identity}, row{"identity", identity},
        row{"identity;q=0.5, gzip;q=0.4", identity}, row{"identity;q=0.5, GZIP ; Q=0.6", gzip},
        row{"identity, gzip", gzip}, row{"gzip;q=nonsense", identity}, row{"gzip;q=1.1", identity},
        row{"gzip;q=2", identity}, row{",, ;, gzip", gzip}, row{"*;q=0", identity}}) {
    EXPECT_EQ(accepted_coding(each.header), each.wanted) << each.header;
  }
}

/// A request that is sent one way or the other, and what its answer says.
struct sum_request {
  std::string body;
  std::string headers;
};

class coded_endpoint : public testing::Test {
 protected:
  coded_endpoint() { options_.port = 0; }

  http_client client() {
    if (!endpoint_) endpoint_ = std::make_unique<endpoint>(options_, service_);
    return http_client{endpoint_->port()};
  }
  client_response once(sum_request const& request, std::string const& more = "") {
    auto connection = client();
    connection.request("POST", "/v2/models/add/infer", request.body, request.headers + more);
    return connection.read_final_response();
  }

  /// Numbers from 0 on plus themselves.
  static sum_request request_of(std::size_t values, content_coding coding, bool is_binary) {
    std::vector<float> numbers(values);
    for (std::size_t i = 0; i < values; ++i) numbers[i] = static_cast<float>(i);
    json inputs = json::array();
    std::string tail;
    for (auto const* const name : {"a", "b"}) {
      json input{{"name", name}, {"datatype", "FP32"}, {"shape", {values}}};
      if (is_binary) {
        input["parameters"] = {{"binary_data_size", values * sizeof(float)}};
        tail.append(reinterpret_cast<char const*>(numbers.data()), values * sizeof(float));
      } else {
        input["data"] = numbers;
      }
      inputs.push_back(std::move(input));
    }
    json document{{"inputs", std::move(inputs)}};
    if (is_binary) document["parameters"] = {{"binary_data_output", true}};
    auto text = document.dump();
    sum_request made{text + tail, ""};
    if (is_binary)
      made.headers = fmt::format("Inference-Header-Content-Length: {}\r\n", text.size());
    if (coding != content_coding::identity) {
      made.body = compressed(made.body, {}, coding);
      made.headers += fmt::format("Content-Encoding: {}\r\n", coding_name(coding));
    }
    return made;
  }

  static void expect_sums(client_response const& response, std::size_t values) {
    ASSERT_EQ(response.status, 200) << response.body;
    auto const header = [&](char const* name) {
      auto const found = response.headers.find(name);
      return found == response.headers.end() ? std::string{} : found->second;
    };
    auto const body =
        decompressed(response.body, coding_of(header("Content-Encoding")).value(), plenty).value();
    auto const length = header("Inference-Header-Content-Length");
    auto const json_bytes = length.empty() ? body.size() : std::stoull(length);
    auto const document = json::parse(body.substr(0, json_bytes));
    std::vector<float> sums(values);
    if (length.empty()) {
      EXPECT_EQ(header("Content-Type"), "application/json");
      sums = document.at("outputs").at(0).at("data").get<std::vector<float>>();
    } else {
      EXPECT_EQ(header("Content-Type"), "application/octet-stream");
      ASSERT_EQ(body.size() - json_bytes, values * sizeof(float));
      std::memcpy(sums.data(), body.data() + json_bytes, values * sizeof(float));
    }
    ASSERT_EQ(sums.size(), values);
    for (std::size_t i = 0; i < values; ++i) ASSERT_EQ(sums[i], static_cast<float>(2 * i));
  }

  /// Every way that a body can be written.
  template <typename Check>
  static void for_each_kind(std::vector<std::size_t> const& sizes, Check check) {
    for (auto const values : sizes) {
      for (auto const coding :
           {content_coding::identity, content_coding::gzip, content_coding::deflate}) {
        for (bool const is_binary : {false, true}) {
          SCOPED_TRACE(fmt::format("{} values as {}, {}", values, coding_name(coding),
                                   is_binary ? "binary" : "JSON"));
          check(values, request_of(values, coding, is_binary));
        }
      }
    }
  }

  endpoint_options options_;
  adding_service service_;
  std::unique_ptr<endpoint> endpoint_;
};

TEST_F(coded_endpoint, bodies_come_and_go_compressed) {
  for_each_kind({1, 1000, 30'000}, [&](std::size_t values, sum_request const& request) {
    for (std::string const wanted : {"", "gzip", "deflate", "identity", "br;q=1, gzip;q=0.1"}) {
      auto const response =
          once(request, wanted.empty() ? "" : "Accept-Encoding: " + wanted + "\r\n");
      expect_sums(response, values);
      bool const is_compressed = values > 100 && wanted != "" && wanted != "identity";
      EXPECT_EQ(response.headers.count("Content-Encoding"), is_compressed ? 1U : 0U) << wanted;
      EXPECT_EQ(response.headers.count("Vary"), values > 100 ? 1U : 0U);
    }
  });
}

TEST_F(coded_endpoint, a_connection_carries_them_one_after_the_other_and_sent_ahead) {
  auto connection = client();
  std::string ahead;
  std::vector<std::size_t> expected;
  for_each_kind({2, 30'000}, [&](std::size_t values, sum_request const& request) {
    connection.request("POST", "/v2/models/add/infer", request.body, request.headers);
    expect_sums(connection.read_final_response(), values);
    ahead +=
        fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\n{}Content-Length: {}\r\n\r\n",
                    request.headers, request.body.size()) +
        request.body;
    expected.push_back(values);
  });
  // from a thread of its own: the answers are as large
  std::thread sender{[&] { connection.send(ahead); }};
  for (auto const values : expected) expect_sums(connection.read_final_response(), values);
  sender.join();
}

TEST_F(coded_endpoint, they_may_come_in_chunks) {
  for_each_kind({2, 30'000}, [&](std::size_t values, sum_request const& request) {
    auto connection = client();
    std::string text =
        "POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n" +
        request.headers + "\r\n";
    for (std::size_t at = 0; at < request.body.size(); at += 4999) {
      auto const piece = request.body.substr(at, 4999);
      text += fmt::format("{:x}\r\n", piece.size()) + piece + "\r\n";
    }
    connection.send(text + "0\r\n\r\n");
    expect_sums(connection.read_final_response(), values);
    connection.request("GET", "/v2/health/live");
    EXPECT_EQ(connection.read_response().status, 200);
  });
}

TEST_F(coded_endpoint, they_may_wait_to_be_asked_for) {
  for_each_kind({2, 30'000}, [&](std::size_t values, sum_request const& request) {
    auto connection = client();
    for (int round = 0; round < 2; ++round) {
      connection.send(
          fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n{}"
                      "Content-Length: {}\r\n\r\n",
                      request.headers, request.body.size()));
      ASSERT_EQ(connection.read_until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
      connection.send(request.body);
      expect_sums(connection.read_final_response(), values);
    }
  });
  for (auto const* const coding : {"br", "gzip, gzip", "gzip\r\nContent-Encoding: gzip"}) {
    auto connection = client();
    connection.send(
        fmt::format("POST /v2/models/add/infer HTTP/1.1\r\nHost: h\r\n"
                    "Expect: 100-continue\r\nContent-Encoding: {}\r\n"
                    "Content-Length: 100\r\n\r\n",
                    coding));
    auto const response = connection.read_response();
    EXPECT_EQ(response.status, 415) << coding;
    EXPECT_EQ(response.headers.at("Accept-Encoding"), "gzip, deflate") << coding;
  }
}

TEST_F(coded_endpoint, a_bomb_is_413_and_a_broken_stream_400) {
  options_.max_body_bytes = 100'000;
  auto const bomb = compressed(std::string(std::size_t{16} << 20U, ' '), {}, content_coding::gzip);
  ASSERT_LT(bomb.size(), 100'000U);
  auto connection = client();
  for (auto const& [body, status] :
       {std::pair{bomb, 413}, std::pair{std::string{"{}"}, 400},
        std::pair{bomb.substr(0, 100), 400}, std::pair{std::string{}, 400}}) {
    connection.request("POST", "/v2/models/add/infer", body, "Content-Encoding: gzip\r\n");
    auto const response = connection.read_final_response();
    EXPECT_EQ(response.status, status) << response.body;
    EXPECT_TRUE(json::parse(response.body).contains("error"));
  }
  connection.request("GET", "/v2/health/live");  // it is as good as before
  EXPECT_EQ(connection.read_response().status, 200);
}

TEST_F(coded_endpoint, every_route_may_be_answered_compressed) {
  service_.set_config(json{{"words", std::string(5000, 'x')}});
  auto connection = client();
  connection.request("GET", "/v2/models/add/config", {}, "Accept-Encoding: gzip\r\n");
  auto const response = connection.read_response();
  EXPECT_EQ(response.headers.at("Content-Encoding"), "gzip");
  EXPECT_LT(response.body.size(), 500U);
  auto const body = decompressed(response.body, content_coding::gzip, plenty).value();
  EXPECT_EQ(json::parse(body).at("words").get<std::string>().size(), 5000U);
  connection.request("HEAD", "/v2/models/add/config", {}, "Accept-Encoding: gzip\r\n");
  auto const head = connection.read_response(false);
  EXPECT_EQ(head.headers.at("Content-Length"), std::to_string(response.body.size()));
  EXPECT_EQ(head.headers.at("Content-Encoding"), "gzip");
}

}  // namespace
}  // namespace sluice::server
