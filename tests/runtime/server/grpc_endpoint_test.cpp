/// The gRPC endpoint over sockets, in front of a service that misbehaves.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/server/grpc/grpc_endpoint.hpp"
#include "runtime/server/grpc/inference.pb.h"
#include "tests/runtime/server/adding_service.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using boost::asio::ip::tcp;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::chrono::minutes long_time{1};

grpc::ByteBuffer buffer_of(std::string const& bytes) {
  grpc::Slice const slice{bytes};
  return {&slice, 1};
}

std::string text_of(grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  if (!buffer.DumpToSingleSlice(&slice).ok()) return {};
  return {reinterpret_cast<char const*>(slice.begin()), slice.size()};
}

/// A call that is under way; it is cancelled if nobody waits for its end.
class running_call {
 public:
  running_call(std::uint16_t port, std::string const& name)
      : stub_(grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                  grpc::InsecureChannelCredentials())),
        name_("/inference.GRPCInferenceService/" + name) {}
  running_call(running_call const&) = delete;
  running_call& operator=(running_call const&) = delete;
  running_call(running_call&&) = delete;
  running_call& operator=(running_call&&) = delete;
  ~running_call() {
    if (is_begun_) {
      cancel();
      static_cast<void>(finished());
    }
  }

  running_call& with(google::protobuf::Message const& request) {
    reader_ =
        stub_.PrepareUnaryCall(&context_, name_, buffer_of(request.SerializeAsString()), &queue_);
    reader_->StartCall();
    reader_->Finish(&answer_, &status_, this);
    is_begun_ = true;
    return *this;
  }
  void cancel() { context_.TryCancel(); }
  grpc::Status finished() {
    wait();
    is_begun_ = false;
    return status_;
  }
  template <typename Answer>
  Answer answer() {
    auto const status = finished();
    EXPECT_TRUE(status.ok()) << status.error_message();
    Answer result;
    EXPECT_TRUE(result.ParseFromString(text_of(answer_)));
    return result;
  }

  /// As a stream, without a message yet.
  void open() {
    stream_ = stub_.PrepareCall(&context_, name_, &queue_);
    stream_->StartCall(this);
    wait();
  }
  void write(google::protobuf::Message const& request) {
    stream_->Write(buffer_of(request.SerializeAsString()), this);
    wait();
  }
  inference::ModelStreamInferResponse read() {
    grpc::ByteBuffer next;
    stream_->Read(&next, this);
    EXPECT_TRUE(wait());
    inference::ModelStreamInferResponse result;
    EXPECT_TRUE(result.ParseFromString(text_of(next)));
    return result;
  }
  grpc::Status ended() {
    stream_->Finish(&status_, this);
    wait();
    return status_;
  }
  void end() {
    stream_->WritesDone(this);
    wait();
  }
  [[nodiscard]] std::string trailing(char const* name) const {
    auto const& all = context_.GetServerTrailingMetadata();
    auto const found = all.find(name);
    return found == all.end() ? "" : std::string{found->second.data(), found->second.size()};
  }

 private:
  bool wait() {
    void* tag = nullptr;
    bool ok = false;
    auto const until = std::chrono::system_clock::now() + long_time;
    EXPECT_EQ(queue_.AsyncNext(&tag, &ok, until), grpc::CompletionQueue::GOT_EVENT);
    return ok;
  }

  grpc::GenericStub stub_;
  std::string const name_;
  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::ByteBuffer answer_;
  grpc::Status status_;
  bool is_begun_ = false;
};

inference::ModelInferRequest addition(std::vector<float> const& values,
                                      std::string const& id = "r") {
  inference::ModelInferRequest asked;
  asked.set_model_name("add");
  asked.set_id(id);
  std::string bytes(values.size() * sizeof(float), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  for (auto const* const name : {"a", "b"}) {
    auto& input = *asked.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    input.add_shape(static_cast<std::int64_t>(values.size()));
    asked.add_raw_input_contents(bytes);
  }
  return asked;
}

inference::ModelInferRequest of_kind(std::string const& model, int kind = 0) {
  inference::ModelInferRequest asked;
  asked.set_model_name(model);
  auto& input = *asked.add_inputs();
  input.set_name("kind");
  input.set_datatype("INT32");
  input.add_shape(1);
  input.mutable_contents()->add_int_contents(kind);
  return asked;
}

float first_of(inference::ModelInferResponse const& answer) {
  float result = 0;
  std::memcpy(&result, answer.raw_output_contents(0).data(), sizeof(result));
  return result;
}

class a_grpc_endpoint : public testing::Test {
 protected:
  a_grpc_endpoint() { options_.port = 0; }

  grpc_endpoint& open() {
    if (!endpoint_) endpoint_ = std::make_unique<grpc_endpoint>(options_, service_);
    return *endpoint_;
  }
  std::unique_ptr<running_call> call(std::string const& name) {
    return std::make_unique<running_call>(open().port(), name);
  }
  std::unique_ptr<running_call> infer(google::protobuf::Message const& request) {
    auto made = call("ModelInfer");
    made->with(request);
    return made;
  }
  /// Blocks until the endpoint has `count` calls.
  void await_calls(std::size_t count) {
    auto const end = std::chrono::steady_clock::now() + long_time;
    while (open().calls() != count) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << open().calls() << " calls";
      std::this_thread::yield();
    }
  }

  grpc_options options_;
  adding_service service_;
  std::unique_ptr<grpc_endpoint> endpoint_;
};

TEST_F(a_grpc_endpoint, answers_small_and_large_messages) {
  auto const small = infer(addition({1, 2}))->answer<inference::ModelInferResponse>();
  EXPECT_EQ(small.id(), "r");
  EXPECT_EQ(first_of(small), 2);
  std::vector<float> const many(1 << 18, 3);
  EXPECT_EQ(first_of(infer(addition(many))->answer<inference::ModelInferResponse>()), 6);
  EXPECT_EQ(open().address(), "127.0.0.1:" + std::to_string(open().port()));
  await_calls(0);
}

TEST_F(a_grpc_endpoint, answers_once_whatever_the_service_does) {
  EXPECT_EQ(infer(of_kind("inline"))->answer<inference::ModelInferResponse>().model_name(),
            "inline");
  EXPECT_EQ(infer(of_kind("twice"))->answer<inference::ModelInferResponse>().model_name(), "twice");
  EXPECT_EQ(infer(of_kind("drops"))->finished().error_code(), grpc::StatusCode::INTERNAL);
  auto const thrown = infer(of_kind("throws"))->finished();
  EXPECT_EQ(thrown.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(thrown.error_message(), "thrown by infer");
}

TEST_F(a_grpc_endpoint, has_a_code_for_each_kind_of_failure) {
  using grpc::StatusCode;
  std::vector<std::pair<error_kind, StatusCode>> const table{
      {error_kind::invalid_argument, StatusCode::INVALID_ARGUMENT},
      {error_kind::not_found, StatusCode::NOT_FOUND},
      {error_kind::out_of_memory, StatusCode::UNAVAILABLE},
      {error_kind::unavailable, StatusCode::UNAVAILABLE},
      {error_kind::deadline_exceeded, StatusCode::DEADLINE_EXCEEDED},
      {error_kind::unsupported, StatusCode::UNIMPLEMENTED},
      {error_kind::model_error, StatusCode::INTERNAL}};
  for (auto const& [kind, code] : table) {
    auto asked = infer(of_kind("fails", static_cast<int>(kind)));
    auto const status = asked->finished();
    EXPECT_EQ(status.error_code(), code) << to_string(kind);
    EXPECT_EQ(status.error_message(), "secret of the service");
    EXPECT_EQ(asked->trailing("retry-after"), code == StatusCode::UNAVAILABLE ? "1" : "");
  }
  auto const bug = infer(of_kind("fails", static_cast<int>(error_kind::internal)))->finished();
  EXPECT_EQ(bug.error_code(), StatusCode::INTERNAL);
  EXPECT_THAT(bug.error_message(), HasSubstr("the server's log has the details"));
}

TEST_F(a_grpc_endpoint, cancels_what_a_client_has_cancelled) {
  service_.hold();
  auto asked = infer(addition({1}));
  service_.await_requests(1);
  asked->cancel();
  EXPECT_EQ(asked->finished().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_THAT(service_.await_cancelled(1), ElementsAre(1));
  await_calls(0);
  service_.release();
}

TEST_F(a_grpc_endpoint, answers_a_stream_in_order_and_goes_on_after_a_failure) {
  auto stream = call("ModelStreamInfer");
  stream->open();
  stream->write(addition({1}, "first"));
  stream->write(of_kind("fails", static_cast<int>(error_kind::not_found)));
  stream->write(addition({2}, "third"));
  EXPECT_EQ(stream->read().infer_response().id(), "first");
  EXPECT_EQ(stream->read().error_message(), "secret of the service");
  auto const third = stream->read();
  EXPECT_EQ(third.infer_response().id(), "third");
  EXPECT_EQ(first_of(third.infer_response()), 4);
  stream->end();
  EXPECT_TRUE(stream->ended().ok());
  await_calls(0);
}

TEST_F(a_grpc_endpoint, reads_no_further_than_the_limit_of_a_stream) {
  service_.hold();
  auto stream = call("ModelStreamInfer");
  stream->open();
  for (int i = 0; i < 100; ++i) stream->write(addition({1}, std::to_string(i)));
  service_.await_requests(64);
  service_.release();
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(stream->read().infer_response().id(), std::to_string(i));
  }
  stream->end();
  EXPECT_TRUE(stream->ended().ok());
}

TEST_F(a_grpc_endpoint, refuses_more_calls_than_it_may_have) {
  options_.max_calls = 1;
  service_.hold();
  auto first = infer(addition({1}));
  service_.await_requests(1);
  auto const second = infer(addition({1}))->finished();
  EXPECT_EQ(second.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(second.error_message(), HasSubstr("all 1 calls"));
  service_.release();
  EXPECT_TRUE(first->finished().ok());
}

TEST_F(a_grpc_endpoint, closes_connections_beyond_its_limit) {
  options_.max_connections = 1;
  boost::asio::io_context io;
  tcp::endpoint const where{boost::asio::ip::address_v4::loopback(), open().port()};
  auto const connected = [&] {
    tcp::socket made{io};
    made.connect(where);
    return made;
  };
  // gRPC says at once what it can do.
  auto const is_taken_in = [](tcp::socket& client) {
    char first = 0;
    boost::system::error_code failure;
    return client.read_some(boost::asio::buffer(&first, 1), failure) == 1;
  };
  auto first = connected();
  EXPECT_TRUE(is_taken_in(first));
  auto second = connected();
  EXPECT_FALSE(is_taken_in(second));
  first.close();
  for (auto const end = std::chrono::steady_clock::now() + long_time;;) {
    auto third = connected();
    if (is_taken_in(third)) break;
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "there is no room again";
  }
}

TEST_F(a_grpc_endpoint, refuses_large_messages_where_too_many_wait) {
  options_.max_waiting_bytes = 1024;
  service_.hold_lookups_of("add");
  std::vector<float> const many(100'000, 3);
  auto first = infer(addition(many));
  service_.await_held_lookup();
  auto const refused = infer(addition(many))->finished();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(refused.error_message(), HasSubstr("too many large bodies"));
  service_.hold_lookups_of("");
  EXPECT_TRUE(first->finished().ok());
}

TEST_F(a_grpc_endpoint, ends_a_call_whose_message_does_not_come) {
  options_.transfer_timeout = std::chrono::milliseconds{1};
  auto stalled = call("ModelInfer");
  stalled->open();
  auto const status = stalled->ended();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), HasSubstr("did not arrive"));
}

TEST_F(a_grpc_endpoint, answers_what_is_due_when_it_stops) {
  service_.hold();
  auto due = infer(addition({1}));
  auto resting = call("ModelStreamInfer");
  resting->open();
  service_.await_requests(1);
  await_calls(2);
  std::thread stopping{[this] { endpoint_->stop(long_time); }};
  auto const ended = resting->ended();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(ended.error_message(), HasSubstr("shutting down"));
  service_.release();
  EXPECT_TRUE(due->finished().ok());
  stopping.join();
}

TEST_F(a_grpc_endpoint, cuts_what_is_left_at_the_end_and_outlives_answers) {
  service_.hold();
  auto asked = infer(addition({1}));
  auto stream = call("ModelStreamInfer");
  stream->open();
  stream->write(addition({1}));
  service_.await_requests(2);
  endpoint_->stop(std::chrono::milliseconds{0});
  EXPECT_FALSE(asked->finished().ok());
  EXPECT_FALSE(stream->ended().ok());
  endpoint_.reset();
  service_.release();
  service_.await_answers(2);
}

TEST_F(a_grpc_endpoint, says_that_its_port_is_taken) {
  options_.port = open().port();
  auto const failure = thrown_by([this] { grpc_endpoint const second{options_, service_}; });
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->kind(), error_kind::already_exists);
  options_.host = "nowhere at all";
  auto const wrong = thrown_by([this] { grpc_endpoint const second{options_, service_}; });
  ASSERT_TRUE(wrong.has_value());
  EXPECT_EQ(wrong->kind(), error_kind::invalid_argument);
}

}  // namespace
}  // namespace sluice::server
