/// The specification of a step, which the one in Python passes as well
/// (tests/runtime/step/step_cases_test.py).
#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <ostream>
#include <sstream>

#include "tests/runtime/torch_step/case_training.hpp"
#include "tests/runtime/torch_step/lost_memory.hpp"
#include "tests/runtime/torch_step/shared_training.hpp"

using namespace sluice::testing;
using nlohmann::json;

namespace {

struct step_case {
  json of;

  friend void PrintTo(step_case const& one, std::ostream* out) { *out << one.of["name"]; }
};

/// Those that a step in C++ passes.
std::vector<step_case> cases() {
  std::vector<std::filesystem::path> files;
  for (auto const& entry : std::filesystem::directory_iterator{STEP_CASES}) {
    if (entry.path().filename().string().ends_with("_cases.json")) {
      files.push_back(entry.path());
    }
  }
  std::ranges::sort(files);
  std::vector<step_case> found;
  for (auto const& file : files) {
    for (auto const& each : json::parse(std::ifstream{file})) {
      if (each.value("only", "c++") == "c++") {
        found.push_back({each});
      }
    }
  }
  return found;
}

/// What a line of a case stands for: "3 times: begin 3 6 | discard".
void add_calls(std::string line, std::vector<std::string>& into) {
  std::string const times = " times: ", between = " | ";
  int count = 1;
  if (auto const at = line.find(times); at != std::string::npos) {
    count = std::stoi(line.substr(0, at));
    line = line.substr(at + times.size());
  }
  for (int i = 0; i < count; ++i) {
    std::size_t begin = 0;
    for (auto end = line.find(between); end != std::string::npos; end = line.find(between, begin)) {
      into.push_back(line.substr(begin, end - begin));
      begin = end + between.size();
    }
    into.push_back(line.substr(begin));
  }
}

std::vector<std::string> calls_of(json const& of) {
  std::vector<std::string> result;
  for (auto const& line : of.value("calls", json::array())) {
    add_calls(line.get<std::string>(), result);
  }
  return result;
}

/// The answers in calls: "plan_next 4 = 0 500".
void set_answers(std::vector<std::string> const& calls, script& into) {
  for (auto const& call : calls) {
    auto const equals = call.find(" = ");
    if (equals != std::string::npos) {
      std::istringstream numbers{call.substr(equals + 3)};
      into.answers[call.substr(0, call.find(' '))].emplace_back(
          std::istream_iterator<std::int64_t>{numbers}, std::istream_iterator<std::int64_t>{});
    }
  }
}

template <typename Error>
bool is(std::exception const& why) {
  return dynamic_cast<Error const*>(&why) != nullptr;
}

bool is_of_kind(std::exception const& why, std::string const& kind) {
  std::map<std::string, bool> const kinds = {
      {"argument", is<std::invalid_argument>(why)},
      {"step", is<sluice::step_error>(why) && !is<sluice::survivors_error>(why) &&
                   !is<sluice::out_of_memory_error>(why)},
      {"survivors", is<sluice::survivors_error>(why)},
      {"out of memory", is<sluice::out_of_memory_error>(why)},
      {"torch's out of memory", is<c10::OutOfMemoryError>(why)},
      {"torch", is<c10::Error>(why)},
      {"runtime", is<std::runtime_error>(why)},
      {"own", is<own_error>(why)}};
  return kinds.at(kind);
}

/// `work` throws what a case expects.
void expect_failure(json const& expected, std::function<void()> const& work) {
  try {
    work();
    ADD_FAILURE() << "nothing was thrown of the kind " << expected["kind"];
  } catch (std::exception const& why) {
    EXPECT_TRUE(is_of_kind(why, expected["kind"])) << why.what();
    for (auto const& words : expected["says"]) {
      EXPECT_THAT(why.what(), ::testing::HasSubstr(words.get<std::string>()));
    }
    for (auto const& words : expected.value("not", json::array())) {
      EXPECT_THAT(why.what(), ::testing::Not(::testing::HasSubstr(words.get<std::string>())));
    }
  }
}

/// All batches of a case; in plain libtorch without the one that fails.
void train(case_training& training, json const& of, bool shared) {
  auto const error = of.value("error", json());
  for (std::size_t number = 0; number < of["batches"].size(); ++number) {
    if (error.is_null() || number != error.value("batch", std::size_t{0})) {
      training.train(number);
    } else if (shared) {
      expect_failure(error, [&] { training.train(number); });
    }
  }
}

std::size_t count_of(std::string const& words, std::string const& text) {
  std::size_t count = 0;
  for (auto at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) {
    ++count;
  }
  return count;
}

class torch_step_cases : public shared_training, public ::testing::WithParamInterface<step_case> {
 protected:
  static void SetUpTestSuite() {
    shared_training::SetUpTestSuite();
    watch_memory();
    case_training const first{{{"name", "the first shares, and so does the process"}}, true};
  }
  void SetUp() override {
    shared_training::SetUp();
    case_ = GetParam().of;
    script_.memory_goes = overwrite_memory;
    script_.drop_launches = drop_launches;
    script_.count_survivors = living_allocations;
    script_.micro_batch_begins = forget_memory;
    set_answers(calls_of(case_), script_);
  }
  /// What a case says of standard error.
  void check_said(std::string const& said) const {
    for (auto const& words : case_.value("said", json::array())) {
      EXPECT_EQ(count_of(words, said), 1) << said;
    }
    if (case_.value("silent", false)) {
      EXPECT_EQ(said, "");
    }
  }
  void check_learned(std::vector<torch::Tensor> const& found) const {
    script_ = {};
    case_training undisturbed{case_, false};
    train(undisturbed, case_, false);
    auto const expected = undisturbed.learned();
    EXPECT_TRUE(case_.value("learned", "bits") == "bits" ? same_bits(found, expected)
                                                         : close(found, expected));
  }

  json case_;
};

TEST_P(torch_step_cases, a_step_is_as_it_is_specified) {
  if (case_.value("refused", false)) {
    expect_failure(case_["error"], [&] { case_training{case_, true}; });
    return;
  }
  case_training training{case_, true};
  ::testing::internal::CaptureStderr();
  train(training, case_, true);
  auto const learned = training.learned();  // with the random state
  check_said(::testing::internal::GetCapturedStderr());
  EXPECT_EQ(script_.sequence, calls_of(case_));
  EXPECT_EQ(training.runs(), case_["runs"].get<int>());
  EXPECT_EQ(training.stats(), case_["stats"]);
  EXPECT_TRUE(training.has_gradients() || !case_.value("gradients", false));
  check_learned(learned);
}

INSTANTIATE_TEST_SUITE_P(specified, torch_step_cases, ::testing::ValuesIn(cases()),
                         [](auto const& test) {
                           return test.param.of["name"].template get<std::string>();
                         });

}  // namespace
