#include "runtime/server/repository/model_repository.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

std::string const config = R"(platform: "pytorch_libtorch"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
)";

class model_repository : public testing::Test {
 protected:
  model_repository() {
    std::string pattern = testing::TempDir() + "/sluice-repository-XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error{"no temporary folder"};
    root_ = pattern;
  }
  ~model_repository() override { fs::remove_all(root_); }

  void write(fs::path const& path, std::string const& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream{root_ / path, std::ios::binary} << text;
  }
  void write_model(std::string const& name, std::vector<std::string> const& versions,
                   std::string const& more = "") const {
    write(fs::path{name} / "config.pbtxt", config + more);
    for (auto const& version : versions) write(fs::path{name} / version / "model.pt", "weights");
  }
  void expect_fault(std::string const& name, error_kind kind,
                    std::vector<std::string> const& says) const {
    auto const failure = thrown_by([&] { static_cast<void>(read_model(root_, name)); });
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->kind(), kind) << failure->what();
    for (auto const& word : says) EXPECT_THAT(failure->what(), HasSubstr(word));
  }

  fs::path root_;
};

TEST_F(model_repository, serves_the_newest_version_by_default) {
  write_model("add", {"2", "10", "9"});
  auto const entries = read_model(root_, "add");
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0].version, "10");
  EXPECT_EQ(entries[0].file, root_ / "add/10/model.pt");
  EXPECT_EQ(entries[0].metadata.name, "add");
  EXPECT_THAT(entries[0].metadata.versions, ElementsAre("10"));
  EXPECT_EQ(entries[0].metadata.platform, "pytorch_libtorch");
  EXPECT_EQ(entries[0].config["name"], "add");
}

TEST_F(model_repository, version_policy_selects_versions) {
  write_model("all", {"1", "2", "10"}, "version_policy { all { } }");
  write_model("two", {"1", "2", "10"}, "version_policy { latest { num_versions: 2 } }");
  write_model("some", {"1", "2", "10"}, "version_policy { specific { versions: [ 10, 1, 1 ] } }");
  auto const versions = [&](std::string const& name) {
    std::vector<std::string> result;
    for (auto const& entry : read_model(root_, name)) result.push_back(entry.version);
    return result;
  };
  EXPECT_THAT(versions("all"), ElementsAre("1", "2", "10"));
  EXPECT_THAT(versions("two"), ElementsAre("2", "10"));
  EXPECT_THAT(versions("some"), ElementsAre("1", "10"));
  EXPECT_THAT(read_model(root_, "all")[0].metadata.versions, ElementsAre("1", "2", "10"));
}

TEST_F(model_repository, lists_all_models_of_all_roots_by_name) {
  write_model("a/zeta", {"1"});
  write_model("a/alpha", {"1"});
  write_model("b/mid", {"1"});
  write("a/README.md", "no model");
  fs::create_directories(root_ / "a/.git");
  std::vector<std::string> names;
  for (auto const& entry : read_repository({root_ / "a", root_ / "b"}).models) {
    names.push_back(entry.metadata.name);
  }
  EXPECT_THAT(names, ElementsAre("alpha", "mid", "zeta"));
}

TEST_F(model_repository, folders_that_are_no_version_are_passed_over) {
  write_model("add", {"1", "02", "latest", "0", "99999999999999999999"});
  write("add/3", "a file, not a folder");
  EXPECT_EQ(read_model(root_, "add").at(0).version, "1");
}

TEST_F(model_repository, another_file_name_is_honoured) {
  write_model("add", {}, "default_model_filename: 'net.ts'");
  write("add/1/net.ts", "weights");
  EXPECT_EQ(read_model(root_, "add").at(0).file, root_ / "add/1/net.ts");
}

TEST_F(model_repository, faults_say_what_is_missing_and_where) {
  write_model("add", {"1"});
  expect_fault("sub", error_kind::not_found, {"'sub'", root_.string(), "add"});
  expect_fault("..", error_kind::not_found, {"'..'"});
  expect_fault("a/b", error_kind::not_found, {"'a/b'"});
  expect_fault("", error_kind::not_found, {"''"});

  fs::create_directories(root_ / "bare/1");
  expect_fault("bare", error_kind::not_found, {"bare/config.pbtxt", "missing", "platform"});

  write_model("empty", {});
  expect_fault("empty", error_kind::not_found, {"no version", "empty/1/model.pt"});

  write_model("fileless", {});
  fs::create_directories(root_ / "fileless/4");
  expect_fault("fileless", error_kind::not_found, {"fileless/4/model.pt", "missing"});

  write_model("hollow", {});
  write("hollow/1/model.pt", "");
  expect_fault("hollow", error_kind::invalid_argument, {"hollow/1/model.pt", "empty"});

  write_model("renamed", {"1"}, "name: 'other'");
  expect_fault("renamed", error_kind::invalid_argument,
               {"renamed/config.pbtxt", "'other'", "'renamed'"});

  write_model("gone", {"1"}, "version_policy { specific { versions: 5 } }");
  expect_fault("gone", error_kind::not_found, {"version 5", "gone/5"});

  write("broken/config.pbtxt", "platform: \"pytorch_libtorch\"\n  input {");
  expect_fault("broken", error_kind::invalid_argument,
               {"broken/config.pbtxt:2:10:", "never closed"});

  write("tensorflow/config.pbtxt", "platform: \"tensorflow_savedmodel\"");
  expect_fault("tensorflow", error_kind::unsupported,
               {"tensorflow/config.pbtxt:1:1:", "tensorflow_savedmodel"});

  write("huge/config.pbtxt", std::string(2'000'000, '\n'));
  expect_fault("huge", error_kind::invalid_argument, {"huge/config.pbtxt", "2000000 bytes"});
}

TEST_F(model_repository, a_model_in_two_repositories_is_served_from_neither) {
  write_model("a/add", {"1"});
  write_model("b/add", {"1"});
  write_model("b/sub", {"1"});
  auto const found = read_repository({root_ / "a", root_ / "b"});
  ASSERT_EQ(found.unservable.size(), 1U);
  EXPECT_EQ(found.unservable[0].reason.kind(), error_kind::already_exists);
  EXPECT_THAT(found.unservable[0].reason.what(), HasSubstr("'add'"));
  ASSERT_EQ(found.models.size(), 1U);
  EXPECT_EQ(found.models[0].metadata.name, "sub");
}

TEST_F(model_repository, what_cannot_be_served_is_listed_with_its_reason_beside_what_can) {
  write_model("add", {"1"});
  fs::create_directories(root_ / "lost+found");
  write("broken/config.pbtxt", "platform: \"pytorch_libtorch\"\n  input {");
  write("onnx/config.pbtxt", "platform: \"onnxruntime_onnx\"");
  fs::create_directories(root_ / "no\xFFname");
  auto const found = read_repository({root_});
  ASSERT_EQ(found.models.size(), 1U);
  EXPECT_EQ(found.models[0].metadata.name, "add");
  std::vector<std::pair<std::string, std::string>> const expected{
      {"broken", "broken/config.pbtxt:2:10:"},
      {"lost+found", "lost+found/config.pbtxt is missing"},
      {"no?name", "not UTF-8"},
      {"onnx", "onnxruntime_onnx"}};
  ASSERT_EQ(found.unservable.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(found.unservable[i].name, expected[i].first);
    EXPECT_THAT(found.unservable[i].reason.what(), HasSubstr(expected[i].second));
    EXPECT_FALSE(found.unservable[i].is_wanted);
  }
}

TEST_F(model_repository, a_folder_that_leads_to_itself_is_no_configuration) {
  fs::create_directories(root_ / "loop");
  fs::create_symlink("config.pbtxt", root_ / "loop/config.pbtxt");
  expect_fault("loop", error_kind::not_found, {"loop/config.pbtxt cannot be read"});
}

TEST_F(model_repository, what_stands_in_the_place_of_a_file_is_said) {
  fs::create_directories(root_ / "folder/config.pbtxt");
  expect_fault("folder", error_kind::not_found, {"folder/config.pbtxt is a folder"});

  fs::create_directories(root_ / "fifo");
  ASSERT_EQ(::mkfifo((root_ / "fifo/config.pbtxt").c_str(), 0600), 0);
  expect_fault("fifo", error_kind::not_found, {"fifo/config.pbtxt is a FIFO"});

  write_model("device", {"1"});
  fs::remove(root_ / "device/1/model.pt");
  fs::create_symlink("/dev/null", root_ / "device/1/model.pt");
  expect_fault("device", error_kind::not_found, {"device/1/model.pt is a device"});

  write_model("nested", {"1/model.pt"});
  expect_fault("nested", error_kind::not_found, {"nested/1/model.pt is a folder"});
}

TEST_F(model_repository, rules_of_batches_and_warm_ups_come_with_every_version) {
  write_model("add", {"1", "2"}, R"(version_policy { all { } } max_batch_size: 4
    dynamic_batching { preferred_batch_size: 2 }
    model_warmup { name: "w" batch_size: 1
      inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 input_data_file: "deep/x" } } })");
  write("add/warmup/deep/x", "1234");
  auto const entries = read_model(root_, "add");
  ASSERT_EQ(entries.size(), 2U);
  for (auto const& entry : entries) {
    EXPECT_EQ(entry.batching.max_batch_size, 4);
    EXPECT_THAT(entry.batching.preferred_sizes, ElementsAre(2));
    ASSERT_EQ(entry.warmup.size(), 1U);
    EXPECT_EQ(entry.warmup[0].inputs[0].file, root_ / "add/warmup/deep/x");
    EXPECT_EQ(entry.config["name"], "add");
  }
}

TEST_F(model_repository, the_data_of_a_warm_up_must_be_there) {
  write_model("add", {"1"}, R"(model_warmup { name: "w" batch_size: 1
      inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 input_data_file: "x" } } })");
  expect_fault("add", error_kind::not_found,
               {"add/config.pbtxt: model_warmup 'w'", "input 'x'", "add/warmup/x is missing"});
  write("add/warmup/x", "123");
  expect_fault("add", error_kind::not_found, {"add/warmup/x is shorter than the 4 bytes"});
  write("add/warmup/x", "1234");
  EXPECT_NO_THROW(static_cast<void>(read_model(root_, "add")));
}

TEST_F(model_repository, an_absent_or_empty_repository_is_refused) {
  for (auto const& root : {root_ / "nowhere", root_}) {
    auto const failure = thrown_by([&] { static_cast<void>(read_repository({root})); });
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->kind(), error_kind::not_found);
    EXPECT_THAT(failure->what(), HasSubstr(root.string()));
  }
}

}  // namespace
}  // namespace sluice::server
