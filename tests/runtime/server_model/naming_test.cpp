#include "runtime/torch/model/detail/naming.hpp"

#include <gtest/gtest.h>

#include "memhandover/base/error.hpp"

namespace sluice::server::testing {
namespace {

using namespace detail;
using places = std::vector<std::size_t>;
using words = std::vector<std::string>;

template <typename Function>
std::string refusal(Function const& function) {
  try {
    (void)function();
  } catch (error const& thrown) {
    return thrown.kind() == error_kind::invalid_argument ? thrown.what() : "another kind";
  }
  return "no refusal";
}

std::string refused_inputs(words const& given, std::vector<argument_name> const& arguments) {
  return refusal([&] { return input_places(given, arguments); });
}

TEST(the_names_of_inputs, go_by_argument_before_they_go_by_index) {
  EXPECT_EQ(input_places({"x__0", "x__1"}, {{"x__1"}, {"x__0"}}).of, (places{1, 0}));
  EXPECT_EQ(input_places({"x__0", "x__1"}, {{"a"}, {"b"}}).of, (places{0, 1}));
}

TEST(the_names_of_inputs, have_the_index_behind_the_first_two_underscores_as_in_triton) {
  EXPECT_EQ(input_places({"my_input__1", "other__0"}, {{"a"}, {"b"}}).of, (places{1, 0}));
  auto const plain = input_places({"my__input__1", "my__input__0"}, {{"a"}, {"b"}});
  EXPECT_EQ(plain.of, (places{0, 1})) << "no index: the order of the configuration";
  EXPECT_TRUE(plain.is_guess);
  EXPECT_TRUE(input_places({"x__", "y__1a"}, {{"a"}, {"b"}}).is_guess);
}

TEST(the_names_of_inputs, need_say_nothing_where_there_is_one) {
  auto const one = input_places({"image"}, {{"x"}, {"scale", true}});
  EXPECT_EQ(one.of, places{0});
  EXPECT_FALSE(one.is_guess);
}

TEST(the_names_of_inputs, are_refused_when_indices_repeat_or_lead_nowhere) {
  EXPECT_EQ(
      refused_inputs({"x__0", "y__0"}, {{"a"}, {"b"}}),
      "its configuration names the inputs 'x__0', 'y__0', but 'x__0' and 'y__0' have the same "
      "index; 'forward' takes 'a', 'b', so give each input indices from 0 to 1");
  EXPECT_EQ(refused_inputs({"x__1", "x__2"}, {{"a"}, {"b"}}),
            "its configuration names the inputs 'x__1', 'x__2', but there is no argument of the "
            "index of 'x__2'; 'forward' takes 'a', 'b', so give each input indices from 0 to 1");
  EXPECT_EQ(refused_inputs({"x__1"}, {{"a"}, {"b", true}}),
            "its configuration names the input 'x__1', but none for the argument 'a' of 'forward', "
            "index 0, which has no default");
  EXPECT_NE(refused_inputs({"x__99999999999999999999", "x__0"}, {{"a"}, {"b"}}), "no refusal");
}

TEST(the_names_of_inputs, are_refused_when_they_mix_both_forms) {
  for (auto const& mixed : {words{"a", "x__1"}, words{"x__0", "plain"}, words{"a", "plain"}}) {
    EXPECT_NE(refused_inputs(mixed, {{"a"}, {"b"}}).find("name all inputs like the arguments"),
              std::string::npos)
        << refused_inputs(mixed, {{"a"}, {"b"}});
  }
}

TEST(the_names_of_inputs, are_as_many_as_there_are_arguments_to_fill) {
  EXPECT_EQ(refused_inputs({"a", "b", "c"}, {{"a"}, {"b"}}),
            "its configuration names the inputs 'a', 'b', 'c', but 'forward' takes 'a', 'b'; name "
            "one input for each");
  EXPECT_EQ(
      refused_inputs({"b"}, {{"a"}, {"b"}, {"c", true}}),
      "its configuration names the input 'b', but 'forward' takes 'a', 'b', 'c', of which the "
      "first 2 must be given; name one input for each");
}

TEST(the_names_of_outputs, go_by_index_or_by_order_and_never_by_both) {
  EXPECT_EQ(output_places({"y__2", "z__0"}).of, (places{2, 0}));
  EXPECT_EQ(output_places({"b", "a"}).of, (places{0, 1}));
  EXPECT_EQ(refusal([] {
              return output_places({"y__0", "z"});
            }),
            "its configuration names the outputs 'y__0', 'z', of which some end with an index and "
            "some do not; name all <name>__<index>, or none, and then in the order of the results");
  EXPECT_EQ(refusal([] {
              return output_places({"y__1", "z__1"});
            }),
            "its configuration names the outputs 'y__1', 'z__1', but 'y__1' and 'z__1' have the "
            "same index; give each its own");
}

}  // namespace
}  // namespace sluice::server::testing
