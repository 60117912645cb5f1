#include "runtime/server/engines/described_models.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice::server {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr auto const* metadata = R"({"name": "encoder", "versions": ["1", "2"], "platform": "onnx",
  "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
  "outputs": [{"name": "y", "datatype": "BYTES", "shape": [1]}]})";

TEST(described_models, what_it_has_said_is_kept_by_model_and_version) {
  described_models models{{"encoder"}};
  EXPECT_THAT(models.questions(), ElementsAre("/v2/models/encoder", "/v2/models/encoder/config"));
  EXPECT_FALSE(models.metadata("encoder", ""));
  EXPECT_THAT(models.learn("/v2/models/encoder", metadata),
              ElementsAre("/v2/models/encoder/versions/1", "/v2/models/encoder/versions/1/config",
                          "/v2/models/encoder/versions/2", "/v2/models/encoder/versions/2/config"));
  auto const said = models.metadata("encoder", "");
  ASSERT_TRUE(said);
  EXPECT_EQ(said->name, "encoder");
  EXPECT_THAT(said->versions, ElementsAre("1", "2"));
  EXPECT_EQ(said->platform, "onnx");
  ASSERT_EQ(said->inputs.size(), 1U);
  EXPECT_EQ(said->inputs[0].name, "x");
  EXPECT_EQ(said->inputs[0].type, datatype::fp32);
  EXPECT_THAT(said->inputs[0].shape, ElementsAre(-1, 4));
  EXPECT_EQ(said->outputs[0].type, datatype::bytes);
  EXPECT_FALSE(models.metadata("encoder", "2"));
  EXPECT_THAT(models.learn("/v2/models/encoder/versions/2", metadata), IsEmpty());
  EXPECT_TRUE(models.metadata("encoder", "2"));
  EXPECT_FALSE(models.config("encoder", ""));
  EXPECT_THAT(models.learn("/v2/models/encoder/config", R"({"max_batch_size": 8})"), IsEmpty());
  EXPECT_EQ(models.config("encoder", "")->at("max_batch_size"), 8);
  EXPECT_FALSE(models.config("encoder", "1"));
}

TEST(described_models, what_is_no_answer_of_that_kind_changes_nothing) {
  described_models models{{"m"}};
  (void)models.learn("/v2/models/m", metadata);
  for (auto const* const body :
       {"", "[]", "not JSON", R"({"inputs": 7})", R"({"inputs": [7]})",
        R"({"inputs": [{"name": "x", "datatype": "FP31", "shape": []}]})",
        R"({"inputs": [{"name": "x", "datatype": "FP32", "shape": ["a"]}]})",
        R"({"outputs": [{"datatype": "FP32", "shape": [1]}]})"}) {
    EXPECT_THAT(models.learn("/v2/models/m", body), IsEmpty()) << body;
    EXPECT_THAT(models.learn("/v2/models/m/config", "[]"), IsEmpty());
    EXPECT_EQ(models.metadata("m", "")->platform, "onnx") << body;
  }
  EXPECT_FALSE(models.config("m", ""));
  EXPECT_THAT(models.learn("/v2/models/m", R"({"versions": ["../x", "", 7, "3"]})"),
              ElementsAre("/v2/models/m/versions/3", "/v2/models/m/versions/3/config"));
}

}  // namespace
}  // namespace sluice::server
