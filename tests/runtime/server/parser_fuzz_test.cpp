/// Feeds damaged input to everything that reads what strangers write: the request codec, the path
/// parser, the reader of model configurations. Each must give a value that holds together, or a
/// typed error that can be sent to a client.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/content_coding.hpp"
#include "runtime/server/http/oip_codec.hpp"
#include "runtime/server/http/routes.hpp"
#include "runtime/server/inference/datatypes.hpp"
#include "runtime/server/repository/model_config.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;

/// Damages a text in one to four places: bytes changed, dropped, doubled, moved, or words of the
/// language put in.
class mutator {
 public:
  mutator(std::uint64_t seed, std::vector<std::string> words)
      : random_(seed), words_(std::move(words)) {}

  std::string damage(std::string text) {
    for (auto rounds = below(4) + 1; rounds > 0; --rounds) once(text);
    return text;
  }
  std::size_t below(std::size_t end) {
    return std::uniform_int_distribution<std::size_t>{0, end - 1}(random_);
  }

 private:
  void once(std::string& text) {
    auto const at = below(text.size() + 1);
    auto const length = std::min(text.size() - at, below(16));
    switch (below(6)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        return;
      case 1:
        text.erase(at, length);
        return;
      case 2:
        text.insert(at, text.substr(at, length));
        return;
      case 3:
        text.insert(at, words_[below(words_.size())]);
        return;
      case 4:
        text.resize(at);
        return;
      default: {
        auto const piece = text.substr(at, length);
        text.erase(at, length);
        text.insert(below(text.size() + 1), piece);
      }
    }
  }

  std::mt19937_64 random_;
  std::vector<std::string> words_;
};

/// Runs `check` on damaged texts for 300 ms from a seed that is always the same, and for as long
/// from one that is printed, so that a failure can be had again; on a slow machine for longer, until
/// there were enough to count those that are accepted. Returns how many texts that were.
int fuzz(std::vector<std::string> const& texts, std::vector<std::string> const& words,
         std::function<void(std::string const&)> const& check) {
  auto const fresh = (std::uint64_t{std::random_device{}()} << 32U) | std::random_device{}();
  std::cout << "random seed " << fresh << '\n';
  int checked = 0;
  for (auto const seed : {std::uint64_t{20240229}, fresh}) {
    mutator random{seed, words};
    auto const enough = checked + 2000;
    auto const end = std::chrono::steady_clock::now() + std::chrono::milliseconds{300};
    while ((checked < enough || std::chrono::steady_clock::now() < end) &&
           !testing::Test::HasFailure()) {
      check(random.damage(texts[random.below(texts.size())]));
      ++checked;
    }
  }
  return checked;
}

void expect_decent(error const& failure, std::string const& text) {
  EXPECT_TRUE(failure.kind() == error_kind::invalid_argument ||
              failure.kind() == error_kind::unsupported)
      << testing::PrintToString(text) << failure.what();
  EXPECT_FALSE(std::string_view{failure.what()}.empty());
  EXPECT_TRUE(json::accept(encode_error(failure.what()))) << testing::PrintToString(text);
}

TEST(parser_fuzz, a_damaged_infer_request_is_a_request_or_an_error) {
  model_metadata const model{"m",
                             {"1"},
                             "p",
                             {{"f", datatype::fp32, {-1, -1}},
                              {"i", datatype::int64, {-1}},
                              {"s", datatype::bytes, {-1}},
                              {"h", datatype::fp16, {2}},
                              {"o", datatype::boolean, {-1}}},
                             {{"y", datatype::fp32, {-1}}}};
  std::string const rest =
      R"({"name":"i","datatype":"INT64","shape":[2],"data":[-9223372036854775808,9007199254740993]},)"
      R"({"name":"s","datatype":"BYTES","shape":[2],"data":["","\u00e9\"x"]},)"
      R"({"name":"h","datatype":"FP16","shape":[2],"data":[0.1,65504]},)"
      R"({"name":"o","datatype":"BOOL","shape":[1],"data":[true]}],"outputs":[{"name":"y"}]})";
  std::string const head =
      R"({"id":"a","parameters":{"timeout":5},"inputs":[{"name":"f","datatype":"FP32","shape":[2,2],)";
  std::vector<std::string> const texts{
      head + R"("data":[[1,2.5],[-3e-1,"NaN"]]},)" + rest, head + R"("data":[1,2,3,4]},)" + rest,
      R"({"inputs":[{"data":[ [1e0 , 0.25],[-0,1E+2] ],"zz":[[{}]],)"
      R"("shape":[2,2],"datatype":"FP32","name":"f"},)" +
          rest};
  std::vector<std::string> const words{"[",
                                       "]",
                                       "{",
                                       "}",
                                       ",",
                                       ":",
                                       "\"",
                                       "\\u",
                                       "null",
                                       "true",
                                       "-",
                                       "1e999",
                                       "1e38",
                                       "18446744073709551616",
                                       "-1",
                                       "0.5",
                                       "\"data\":",
                                       "\"shape\":",
                                       "\"inputs\":",
                                       "\"name\":\"f\",",
                                       "\"parameters\":{",
                                       "\xFF",
                                       "\xED\xA0\x80",
                                       "NaN",
                                       "[4294967296,4294967296]",
                                       std::string(100, '['),
                                       std::string(1, '\0')};
  int accepted = 0;
  int const checked = fuzz(texts, words, [&](std::string const& text) {
    infer_request request;
    try {
      request = decode_infer_request(text, model);
    } catch (error const& failure) {
      return expect_decent(failure, text);
    }
    ++accepted;
    ASSERT_EQ(request.inputs.size(), 5U) << testing::PrintToString(text);
    auto const response =
        json::parse(encode_infer_response({"m", "1", request.id, request.inputs}).json);
    auto const again = decode_infer_request(json{{"inputs", response["outputs"]}}.dump(), model);
    for (std::size_t i = 0; i < request.inputs.size(); ++i) {
      EXPECT_EQ(again.inputs[i].data, request.inputs[i].data) << testing::PrintToString(text);
      EXPECT_EQ(again.inputs[i].shape, request.inputs[i].shape) << testing::PrintToString(text);
    }
  });
  std::cout << accepted << " of " << checked << " accepted\n";
  EXPECT_GT(accepted,
            checked / 200);  // else the damage is too great for anything but the first checks
}

TEST(parser_fuzz, a_damaged_request_with_binary_tensors_is_a_request_or_an_error) {
  model_metadata const model{
      "m",
      {"1"},
      "p",
      {{"f", datatype::fp32, {-1}}, {"s", datatype::bytes, {-1}}, {"o", datatype::boolean, {-1}}},
      {}};
  std::string const text =
      R"({"inputs":[{"name":"f","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}},)"
      R"({"name":"s","datatype":"BYTES","shape":[2],"parameters":{"binary_data_size":10}},)"
      R"({"name":"o","datatype":"BOOL","shape":[2],"parameters":{"binary_data_size":2}}]})";
  std::string const raw{"12345678\1\0\0\0x\1\0\0\0y\0\1", 20};
  auto const length = static_cast<std::ptrdiff_t>(text.size());
  std::vector<std::string> const words{std::string(4, '\0'), "\xFF", "8", "[3]", "0", "-1", "1e1"};
  int accepted = 0;
  int const checked = fuzz({text + raw}, words, [&](std::string const& damaged) {
    auto const body = std::make_shared<std::string>(damaged);
    // Where the JSON ends as before, unless it lies in what was damaged.
    auto const end = body->rfind("]}");
    auto const split = end == std::string::npos
                           ? std::min(static_cast<std::size_t>(length), body->size())
                           : end + 2;
    infer_request request;
    try {
      request = decode_infer_request(
          {std::string_view{*body}.substr(0, split),
           std::as_writable_bytes(std::span{*body}.subspan(split)), true, body},
          model);
    } catch (error const& failure) {
      return expect_decent(failure, damaged);
    }
    ++accepted;
    std::size_t bytes = 0;
    for (auto const& each : request.inputs) bytes += each.data.size();
    EXPECT_EQ(request.inputs.size(), 3U) << testing::PrintToString(damaged);
    EXPECT_EQ(bytes, body->size() - split) << testing::PrintToString(damaged);
    auto const answer = encode_infer_response({"m", "1", "", request.inputs}, {true, {}});
    EXPECT_EQ(answer.tensors.size(), 3U) << testing::PrintToString(damaged);
  });
  std::cout << accepted << " of " << checked << " accepted\n";
  EXPECT_GT(accepted, checked / 500);
}

TEST(parser_fuzz, a_damaged_compressed_body_is_a_body_or_an_error) {
  constexpr std::uint64_t most = 5000;
  std::vector<std::string> texts;
  for (auto const coding : {content_coding::gzip, content_coding::deflate}) {
    texts.push_back(compressed(std::string(300, '7') + "[0.5,1.25]", {}, coding));
    texts.push_back(compressed(std::string(50'000, ' '), {}, coding));
  }
  std::vector<std::string> const words{std::string(4, '\0'), "\xFF\xFF", "\x1F\x8B\x08",
                                       "\x78\x01",           texts[0],   texts[1]};
  int refused = 0;
  int const checked = fuzz(texts, words, [&](std::string const& text) {
    for (auto const coding : {content_coding::gzip, content_coding::deflate}) {
      try {
        auto const body = decompressed(text, coding, most);
        EXPECT_TRUE(!body || body->size() <= most) << testing::PrintToString(text);
      } catch (error const& failure) {
        ++refused;
        expect_decent(failure, text);
      }
    }
  });
  std::cout << refused << " of " << 2 * checked << " refused\n";
  EXPECT_LT(refused, 2 * checked);
}

TEST(parser_fuzz, a_damaged_model_configuration_is_a_configuration_or_an_error) {
  std::vector<std::string> const texts{R"(# model
name: "m"
platform: "pytorch_libtorch"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 0x10 ] }, { name: "r" data_type: TYPE_INT64 dims: [ ] } ]
output < name: 'y' data_type: TYPE_BOOL dims: 1 dims: 2 >
version_policy { specific { versions: [ 1, 2 ] } }
parameters { key: "k\n\x41\u00e9" value: { string_value: "v" } }
instance_group { count: 1 kind: KIND_CPU } dynamic_batching { preferred_batch_size: [ 4, 8 ] }
)",
                                       R"(backend: "pytorch"
max_batch_size: 8
input: { name: "x" data_type: TYPE_FP32 dims: -1 format: FORMAT_NCHW optional: false reshape { shape: [ 1, -1 ] } }
output { name: "y" data_type: TYPE_STRING dims: [ ] }
dynamic_batching {
	preferred_batch_size: 2 max_queue_delay_microseconds: 100
	priority_levels: 2 default_priority_level: 1
	default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 }
	priority_queue_policy { key: 2 value { max_queue_size: 7 allow_timeout_override: true } }
}
model_warmup [ { name: "w" batch_size: 1 count: 2
	inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 input_data_file: "x" } } } ]
optimization { cuda { graph_spec { input { key: "x" value { dim: [ 4 ] } } } } }
model_metrics { metric_control { histogram_options { buckets: [ 0.5, inf ] } } }
)"};
  std::vector<std::string> const words{"{",
                                       "}",
                                       "[",
                                       "]",
                                       "<",
                                       ">",
                                       ":",
                                       ",",
                                       ";",
                                       "\"",
                                       "'",
                                       "\\",
                                       "#",
                                       "\n",
                                       "-",
                                       "0x",
                                       "1.5",
                                       "1e9",
                                       "18446744073709551616",
                                       "inf",
                                       "name",
                                       "dims: ",
                                       "input",
                                       "\xFF",
                                       "\\U0011FFFF",
                                       "[a.b]: 1 ",
                                       "key: 1 ",
                                       "value { } ",
                                       "\t",
                                       "priority_levels: ",
                                       "preserve_ordering: true ",
                                       "dynamic_batching ",
                                       "priority_queue_policy { key: 1 } ",
                                       "inputs { key: 'x' } ",
                                       "model_warmup { batch_size: 1 } ",
                                       "99",
                                       "\\xFF",
                                       "\xEF\xBB\xBF",
                                       std::string(100, '{'),
                                       std::string(1, '\0')};
  int accepted = 0;
  int const checked = fuzz(texts, words, [&](std::string const& text) {
    try {
      auto const config = read_model_config(text, "f");
      ++accepted;
      EXPECT_FALSE(config.inputs.empty());
      EXPECT_FALSE(config.outputs.empty());
      EXPECT_TRUE(json::accept(config.json.dump())) << testing::PrintToString(text);
      EXPECT_EQ(config.batching.max_batch_size, config.max_batch_size);
      for (auto const size : config.batching.preferred_sizes) {
        EXPECT_TRUE(size >= 1 && size <= config.max_batch_size) << testing::PrintToString(text);
      }
      for (auto const& [level, policy] : config.batching.policies) {
        EXPECT_TRUE(level >= 1 && level <= config.batching.priority_levels)
            << testing::PrintToString(text);
      }
      for (auto const& sample : config.warmup) {
        EXPECT_EQ(sample.inputs.size(), config.inputs.size()) << testing::PrintToString(text);
      }
    } catch (error const& failure) {
      EXPECT_TRUE(std::string_view{failure.what()}.starts_with("f:")) << failure.what();
      expect_decent(failure, text);
    }
  });
  std::cout << accepted << " of " << checked << " accepted\n";
  EXPECT_GT(accepted,
            checked / 200);  // else the damage is too great for anything but the first checks
}

TEST(parser_fuzz, a_damaged_target_is_a_route_or_an_error) {
  std::vector<std::string> const texts{"/v2/models/a%2Fb%C3%A9/versions/3/infer?x=%zz",
                                       "http://h:1/v2/repository/index", "/v2/health/ready"};
  std::vector<std::string> const words{"/", "//",  "%",  "%00",      "%FF", "?",
                                       "#", "://", "..", "versions", "v2"};
  int found = 0;
  int const checked = fuzz(texts, words, [&](std::string const& text) {
    try {
      auto const where = parse_target(text);
      if (!where) return;
      ++found;
      EXPECT_TRUE(is_utf8(where->model));
      EXPECT_TRUE(is_utf8(where->version));
    } catch (error const& failure) {
      expect_decent(failure, text);
    }
  });
  std::cout << found << " of " << checked << " accepted\n";
  EXPECT_GT(found,
            checked / 200);  // else the damage is too great for anything but the first checks
}

}  // namespace
}  // namespace sluice::server
