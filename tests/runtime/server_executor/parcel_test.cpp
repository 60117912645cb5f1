#include "runtime/server/executor/parcel.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <functional>

#include "memhandover/base/descriptor_limit.hpp"
#include "tests/runtime/server_model/sum_model.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using memhandover::unique_fd;
using nlohmann::json;

class a_parcel : public ::testing::Test {
 protected:
  a_parcel() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
    here_ = unique_fd{ends[0]};
    there_ = unique_fd{ends[1]};
  }

  memhandover::message pass(parcel const& sent) {
    EXPECT_TRUE(sent.try_send(here_.get()));
    return std::move(memhandover::receive_any(there_.get()).received.value());
  }

  unique_fd here_, there_;
};

parcel without_file(parcel const& from) {
  parcel made{from.body, from.bytes, {}, from.form, from.fields};
  made.ticket = from.ticket;
  return made;
}

tensor bytes_of(std::string name, std::size_t count, unsigned char value) {
  return {std::move(name),
          datatype::uint8,
          {static_cast<std::int64_t>(count)},
          std::vector<std::byte>(count, std::byte{value})};
}

void expect_same(std::vector<tensor> const& seen, std::vector<tensor> const& expected) {
  ASSERT_EQ(seen.size(), expected.size());
  for (std::size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].name, expected[i].name);
    EXPECT_EQ(seen[i].type, expected[i].type);
    EXPECT_EQ(seen[i].shape, expected[i].shape);
    EXPECT_EQ(seen[i].data, expected[i].data);
  }
}

TEST_F(a_parcel, brings_a_request_as_it_was_but_for_its_id) {
  infer_request sent;
  sent.model = "sum";
  sent.version = "2";
  sent.id = "the client's own";
  sent.inputs = {number("a", 7), {"empty", datatype::fp32, {0}, {}}, number("b", -1)};
  sent.outputs = {"sum", "ä"};
  sent.timeout = 1500us;
  sent.arrival = std::chrono::steady_clock::now();
  sent.ticket = 99;
  sent.mark = 7;
  sent.expected = 123ms;
  sent.priority = 3;
  sent.is_alone = true;
  sent.is_suspect = true;
  auto const seen = unwrap_request(pass(wrap(sent)));
  EXPECT_EQ(seen.model, sent.model);
  EXPECT_EQ(seen.version, sent.version);
  EXPECT_EQ(seen.id, "");
  EXPECT_EQ(seen.outputs, sent.outputs);
  EXPECT_EQ(seen.timeout, sent.timeout);
  EXPECT_EQ(seen.arrival, sent.arrival);
  EXPECT_EQ(seen.ticket, sent.ticket);
  EXPECT_EQ(seen.mark, sent.mark);
  EXPECT_EQ(seen.expected, sent.expected);
  EXPECT_EQ(seen.priority, sent.priority);
  EXPECT_TRUE(seen.is_alone);
  EXPECT_TRUE(seen.is_suspect);
  expect_same(seen.inputs, sent.inputs);
}

TEST_F(a_parcel, that_comes_again_may_be_expected_otherwise) {
  infer_request sent;
  sent.expected = 123ms;
  auto parcel = wrap(sent);
  parcel.expected = 0ms;
  EXPECT_EQ(unwrap_request(pass(std::move(parcel))).expected, 0ms);
}

TEST_F(a_parcel, brings_large_tensors_in_a_file) {
  for (std::size_t const count :
       {std::size_t{1}, std::size_t{32768}, std::size_t{32769}, std::size_t{5'000'000}}) {
    infer_response sent{"m", "1", "", {bytes_of("a", count, 3), bytes_of("b", 5, 4)}};
    if (count == 1) {
      sent.times = {.queue = 3s,
                    .compute = 7ns,
                    .batch = {.requests = 4, .samples = 9, .is_first = false},
                    .found_cold = true};
    }
    auto const made = wrap(infer_result{sent});
    auto const received = pass(made);
    EXPECT_EQ(is_large(received), count + 5 > 32768) << count;
    auto const seen = std::get<infer_response>(unwrap_result(received));
    EXPECT_EQ(seen.model, "m");
    EXPECT_EQ(seen.times, sent.times);
    expect_same(seen.outputs, sent.outputs);
  }
}

TEST_F(a_parcel, has_large_tensors_where_they_can_be_computed_with) {
  infer_request sent;
  sent.model = "m";
  sent.inputs = {bytes_of("a", 40'001, 1),
                 {"empty", datatype::fp32, {0}, {}},
                 bytes_of("b", 7, 2),
                 bytes_of("c", 1, 3),
                 {"last", datatype::fp64, {0, 3}, {}}};
  auto const made = wrap(sent);
  auto seen = unwrap_request(pass(made));  // the message has gone, the tensors are there
  expect_same(seen.inputs, sent.inputs);
  for (auto const& each : seen.inputs) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(each.data.data()) % 64, 0U) << each.name;
  }
  // A model may compute in place: another process that gets the same request later sees nothing of it.
  seen.inputs[0].data.data()[0] = std::byte{9};
  expect_same(unwrap_request(pass(made)).inputs, sent.inputs);
}

/// Two tensors of different bytes, which come in one file.
infer_request large_request() {
  infer_request made;
  made.model = "sum";
  made.inputs = {bytes_of("a", 100'001, 1), bytes_of("b", 70'000, 2)};
  made.inputs[1].data.data()[69'999] = std::byte{3};
  return made;
}

std::vector<std::byte> copied(tensor const& from) {
  std::vector<std::byte> to(from.data.size());
  from.data.copy_to(to.data());
  return to;
}

TEST_F(a_parcel, has_large_tensors_that_can_be_read_before_and_after_they_are_mapped) {
  auto const sent = large_request();
  auto seen = unwrap_request(pass(wrap(sent)));
  auto const part = seen.inputs[1].data.part(69'998, 2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(copied(seen.inputs[0]), copied(sent.inputs[0]));
    EXPECT_EQ(copied(seen.inputs[1]), copied(sent.inputs[1]));
    EXPECT_EQ(part.span()[1], std::byte{3});
    seen.inputs[1].data.data()[69'998] = std::byte{3};  // its own copy
    EXPECT_EQ(part.span()[0], std::byte{3});
    seen.inputs[1].data.data()[69'998] = std::byte{2};
  }
}

TEST_F(a_parcel, has_its_large_tensors_though_many_descriptors_are_open) {
  memhandover::raise_descriptor_limit();
  std::vector<unique_fd> open;
  constexpr std::size_t many = 1100;
  for (std::size_t i = 0; i < many; ++i) {
    open.emplace_back(::dup(here_.get()));
  }
  ASSERT_TRUE(open.back()) << "the limit of descriptors is too low";
  auto const sent = large_request();
  auto const seen = unwrap_request(pass(wrap(sent)));
  EXPECT_EQ(copied(seen.inputs[1]), copied(sent.inputs[1]));
  EXPECT_EQ(seen.inputs[0].data, sent.inputs[0].data);
}

TEST_F(a_parcel, in_a_file_that_may_change_is_refused) {
  infer_response const answer{"m", "1", "", {bytes_of("a", 40'000, 3)}};
  auto const good = wrap(infer_result{answer});
  EXPECT_NE(::ftruncate(good.file.get(), 10), 0);
  EXPECT_LT(::pwrite(good.file.get(), "x", 1, 0), 0);
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  unique_fd const written{pipe[1]};
  std::vector<unique_fd> files;
  files.emplace_back(pipe[0]);
  files.emplace_back(::memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  files.emplace_back(::memfd_create("never sealed", MFD_CLOEXEC));
  for (auto& file : files) {
    (void)::ftruncate(file.get(), 40'000);
    auto bad = without_file(good);
    bad.file = std::move(file);
    auto const received = pass(bad);
    try {
      (void)unwrap_result(received);
      ADD_FAILURE();
    } catch (error const& refused) {
      EXPECT_EQ(refused.kind(), error_kind::invalid_argument);
    }
  }
  files.clear();
  unique_fd empty{::memfd_create("empty", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  ASSERT_EQ(::fcntl(empty.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE),
            0);
  auto bad = without_file(good);
  bad.file = std::move(empty);
  EXPECT_THROW((void)unwrap_result(pass(bad)), error);
}

TEST_F(a_parcel, brings_every_kind_of_failure) {
  for (auto const kind :
       {error_kind::invalid_argument, error_kind::not_found, error_kind::already_exists,
        error_kind::out_of_memory, error_kind::unavailable, error_kind::deadline_exceeded,
        error_kind::unsupported, error_kind::cancelled, error_kind::aborted,
        error_kind::model_error, error_kind::misconfigured, error_kind::internal}) {
    auto const seen = unwrap_result(pass(wrap(infer_result{error{kind, "why"}})));
    EXPECT_EQ(failure_of(seen), kind);
    EXPECT_STREQ(std::get<error>(seen).what(), "why");
    EXPECT_FALSE(std::get<error>(seen).retry_after());
  }
  auto const cut = unwrap_result(
      pass(wrap(infer_result{error{error_kind::internal, std::string(1'000'000, 'x')}})));
  EXPECT_EQ(failure_of(cut), error_kind::internal);
  auto const later = unwrap_result(
      pass(wrap(infer_result{error{error_kind::unavailable, "", std::chrono::milliseconds{7}}})));
  EXPECT_EQ(std::get<error>(later).retry_after(), std::chrono::milliseconds{7});
}

TEST_F(a_parcel, brings_texts_of_any_length) {
  for (std::size_t const length : {std::size_t{0}, std::size_t{10}, std::size_t{1'000'000}}) {
    std::string const text(length, 't');
    EXPECT_EQ(unwrap_text(pass(wrap_text({{"type", "text"}}, text))), text);
  }
}

TEST_F(a_parcel, that_is_none_is_refused) {
  auto const good = wrap([] {
    infer_request request;
    request.model = "sum";
    request.inputs = {number("a", 7)};
    return request;
  }());
  std::vector<parcel> spoilt;
  for (std::size_t left = 0; left < good.fields.size(); ++left) {  // whatever is missing
    spoilt.push_back(without_file(good));
    spoilt.back().fields.resize(left);
    spoilt.back().bytes.clear();
  }
  auto const shape_of_a = sizeof(std::int64_t), count_of_a = sizeof(std::uint64_t);
  auto const type_of_a =
      good.fields.size() - count_of_a - shape_of_a - sizeof(std::uint32_t) - sizeof(std::uint8_t);
  using change = std::function<void(parcel&)>;
  for (change const& spoil : std::vector<change>{
           [](parcel& it) { it.form = parcel_form::result; },
           [](parcel& it) { it.form = static_cast<parcel_form>(9); },
           [=](parcel& it) { it.fields[type_of_a] = std::byte{14}; },        // of no type
           [=](parcel& it) { it.fields[type_of_a + 4] = std::byte{0xFF}; },  // of many dimensions
           [](parcel& it) { it.fields[it.fields.size() - 8] = std::byte{9}; },  // of more bytes
           [](parcel& it) { it.fields.back() = std::byte{0x10}; },
           [](parcel& it) { it.fields.back() = std::byte{0xFF}; },
           [](parcel& it) { it.bytes.pop_back(); },
           [](parcel& it) { it.bytes.clear(); },
       }) {
    spoilt.push_back(without_file(good));
    spoil(spoilt.back());
  }
  for (std::size_t i = 0; i < spoilt.size(); ++i) {
    auto const received = pass(spoilt[i]);
    try {
      (void)unwrap_request(received);
      ADD_FAILURE() << i;
    } catch (error const& refused) {
      EXPECT_EQ(refused.kind(), error_kind::invalid_argument) << i;
    }
  }
  EXPECT_THROW((void)unwrap_request(pass(wrap_text({{"type", "infer"}}, ""))), error);
}

TEST_F(a_parcel, that_is_plain_is_refused_where_json_is_expected) {
  infer_request request;
  request.model = "sum";
  ASSERT_TRUE(wrap(request).try_send(here_.get()));
  EXPECT_THROW((void)memhandover::receive_message(there_.get()), error);
}

TEST_F(a_parcel, is_waited_for_by_nobody_who_does_not_want_to) {
  auto const none = memhandover::receive_if_there(there_.get());
  EXPECT_FALSE(none.received);
  EXPECT_FALSE(none.has_ended);
  ASSERT_TRUE(wrap_text({{"type", "text"}}, "t").try_send(here_.get()));
  EXPECT_TRUE(memhandover::receive_if_there(there_.get()).received);
  here_.reset();
  EXPECT_TRUE(memhandover::receive_if_there(there_.get()).has_ended);
}

TEST_F(a_parcel, that_a_full_socket_does_not_take_is_kept) {
  auto const made = wrap_text({{"type", "text"}}, std::string(10'000, 't'));
  int sent = 0;
  while (made.try_send(here_.get())) {
    ++sent;
  }
  ASSERT_GT(sent, 0);
  EXPECT_EQ(unwrap_text(memhandover::receive_message(there_.get()).value()).size(), 10'000U);
  EXPECT_TRUE(made.try_send(here_.get()));
  there_.reset();
  EXPECT_THROW((void)made.try_send(here_.get()), error);
}

}  // namespace
}  // namespace sluice::server::testing
