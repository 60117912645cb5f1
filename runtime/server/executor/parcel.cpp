#include "runtime/server/executor/parcel.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"
#include "runtime/server/executor/detail/fields.hpp"
#include "runtime/server/executor/detail/received_file.hpp"

namespace sluice::server {
namespace {

using detail::field_reader;
using detail::put_number;
using detail::put_raw;
using detail::put_text;
using detail::received_file;
using memhandover::unique_fd;
using nlohmann::json;
using std::chrono::steady_clock;

constexpr std::size_t most_bytes_beside = 32U << 10U;
/// In the place of a time that there is none of.
constexpr std::int64_t no_time = std::numeric_limits<std::int64_t>::min();
constexpr std::size_t longest_error = 16U << 10U;
/// In a file a tensor begins at a multiple of this, so that it can be computed with where it lies.
constexpr std::size_t alignment = 64;
/// Who has mapped a file is not to lose a page of it, nor to see it change.
/// Of those that keep a file from being written, this one asks for no more than that nobody begins to: F_SEAL_WRITE waits, and in the
/// end fails with EBUSY, as long as the kernel itself holds one of the file's pages, as it does when memory is scarce. Who has
/// written the file has it mapped nowhere.
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;

error no_message(char const* what) {
  return {error_kind::invalid_argument,
          std::string{"a message between a server and its executor has "} + what};
}

std::size_t aligned(std::size_t place) {
  return (place + alignment - 1) / alignment * alignment;
}

std::vector<int> descriptors_of(parcel const& from) {
  return from.file ? std::vector<int>{from.file.get()} : std::vector<int>{};
}

class file_of_tensors {
 public:
  file_of_tensors()
      : file_(memhandover::beside_standard_streams(
            unique_fd{::memfd_create("sluice-tensors", MFD_CLOEXEC | MFD_ALLOW_SEALING)})) {
    if (!file_) {
      throw memhandover::system_error("cannot make a file for a request's tensors");
    }
  }

  void append(std::span<std::byte const> bytes) {
    if (!bytes.empty()) {
      end_ = aligned(end_);
    }
    while (!bytes.empty()) {
      auto const written =
          ::pwrite(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(end_));
      if (written < 0 && errno != EINTR) {
        throw memhandover::system_error("cannot write a request's tensors");
      }
      auto const done = static_cast<std::size_t>(written < 0 ? 0 : written);
      bytes = bytes.subspan(done);
      end_ += done;
    }
  }

  [[nodiscard]] unique_fd sealed() {
    if (::fcntl(file_.get(), F_ADD_SEALS, seals) != 0) {
      throw memhandover::system_error("cannot seal a request's tensors");
    }
    return std::move(file_);
  }

 private:
  unique_fd file_;
  std::size_t end_ = 0;
};

/// Beside the message if they are few.
void put_bytes(std::span<std::span<std::byte const> const> parts, parcel& into) {
  std::size_t bytes = 0;
  for (auto const& each : parts) {
    bytes += each.size();
  }
  if (bytes <= most_bytes_beside) {
    for (auto const& each : parts) {
      into.bytes.insert(into.bytes.end(), each.begin(), each.end());
    }
    return;
  }
  file_of_tensors file;
  for (auto const& each : parts) {
    file.append(each);
  }
  into.file = file.sealed();
}

void wrap_tensors(std::vector<tensor> const& tensors, parcel& into) {
  std::vector<std::span<std::byte const>> parts;
  parts.reserve(tensors.size());
  put_number(into.fields, static_cast<std::uint32_t>(tensors.size()));
  for (auto const& each : tensors) {
    put_text(into.fields, each.name);
    put_number(into.fields, static_cast<std::uint8_t>(each.type));
    put_number(into.fields, static_cast<std::uint32_t>(each.shape.size()));
    put_raw(into.fields, each.shape.data(), each.shape.size() * sizeof(std::int64_t));
    put_number(into.fields, std::uint64_t{each.data.size()});
    parts.push_back(each.data.span());
  }
  put_bytes(parts, into);
}

/// Of all tensors of a message, in order. Those in a file are used where they lie.
class message_bytes {
 public:
  /// Those after the first `begin`, if they are not in a file.
  explicit message_bytes(memhandover::message const& from, std::size_t begin = 0) : from_(from) {
    if (from.descriptors.empty()) {
      size_ = from.bytes.size();
      taken_ = begin;
      return;
    }
    auto const file = from.descriptors.front().get();
    auto const has = ::fcntl(file, F_GET_SEALS);
    if (has < 0 || (has & seals) != seals) {
      throw no_message("a file that may change");
    }
    struct stat facts {};
    if (::fstat(file, &facts) != 0) {
      throw memhandover::system_error("cannot see the tensors of a message");
    }
    size_ = static_cast<std::size_t>(facts.st_size);
    if (size_ > 0) {
      file_ = std::make_shared<received_file>(file, size_);
    }
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  [[nodiscard]] tensor_bytes take(std::size_t bytes) {
    if (bytes == 0) {
      return {};
    }
    auto const begin = file_ ? aligned(taken_) : taken_;
    if (begin > size_ || bytes > size_ - begin) {
      throw no_message("fewer bytes than its tensors");
    }
    taken_ = begin + bytes;
    if (file_) {
      return {file_, begin, bytes};
    }
    auto const* const first = from_.bytes.data() + begin;
    return std::vector<std::byte>{first, first + bytes};
  }

 private:
  memhandover::message const& from_;
  std::shared_ptr<received_file> file_;
  std::size_t size_ = 0, taken_ = 0;
};

std::vector<tensor> unwrap_tensors(field_reader& fields, message_bytes bytes) {
  constexpr std::size_t least = 2 * sizeof(std::uint32_t) + 1 + sizeof(std::uint64_t);
  std::vector<tensor> tensors(fields.count(least));
  for (auto& each : tensors) {
    each.name = fields.text();
    auto const type = fields.number<std::uint8_t>();
    if (type > static_cast<std::uint8_t>(datatype::bytes)) {
      throw no_message("a tensor of no type");
    }
    each.type = static_cast<datatype>(type);
    each.shape.resize(fields.count(sizeof(std::int64_t)));
    auto const shape = fields.take(each.shape.size() * sizeof(std::int64_t));
    std::copy(shape.begin(), shape.end(), std::as_writable_bytes(std::span{each.shape}).begin());
    each.data = bytes.take(fields.number<std::uint64_t>());
  }
  return tensors;
}

/// Where fields begin, and after them the tensors' bytes.
constexpr std::size_t facts_bytes = 3 + sizeof(std::uint32_t) + 3 * sizeof(std::uint64_t);

field_reader fields_of(memhandover::message const& message, plain_facts const& facts) {
  return field_reader{std::span{message.bytes}.subspan(facts_bytes, facts.field_bytes)};
}

message_bytes bytes_of(memhandover::message const& message, plain_facts const& facts) {
  return message_bytes{message, facts_bytes + facts.field_bytes};
}

infer_response response_in(memhandover::message const& message, plain_facts const& facts) {
  auto fields = fields_of(message, facts);
  infer_response made;
  if (fields.number<std::uint8_t>() != 0) {
    made.times.emplace();
    made.times->queue = std::chrono::nanoseconds{fields.number<std::int64_t>()};
    made.times->compute = std::chrono::nanoseconds{fields.number<std::int64_t>()};
    made.times->batch = {fields.number<std::uint32_t>(), fields.number<std::uint64_t>(),
                         fields.number<std::uint8_t>() != 0};
    made.times->found_cold = fields.number<std::uint8_t>() != 0;
    if (made.times->batch.requests == 0) {
      throw no_message("a batch of no request");
    }
  }
  made.model = fields.text();
  made.version = fields.text();
  made.outputs = unwrap_tensors(fields, bytes_of(message, facts));
  for (auto& each : made.outputs) {
    (void)each.data.data();  // who writes them to a client could not say that there is no room
  }
  return made;
}

/// Runs `work`, which takes a message apart.
template <typename Work>
auto checked(Work work) {
  try {
    return work();
  } catch (json::exception const&) {
    throw no_message("other fields than it takes");
  }
}

}  // namespace

bool parcel::try_send(int socket) const {
  if (form == parcel_form::json) {
    return memhandover::try_send_message(socket, body, descriptors_of(*this), bytes);
  }
  std::vector<std::byte> facts;
  facts.reserve(facts_bytes);
  put_number(facts, form);
  put_number(facts, is_alone);
  put_number(facts, is_suspect);
  put_number(facts, static_cast<std::uint32_t>(fields.size()));
  put_number(facts, ticket);
  put_number(facts, std::uint64_t{place});
  put_number(facts, std::int64_t{expected ? expected->count() : no_time});
  std::array<std::span<std::byte const>, 3> const parts{facts, fields, bytes};
  return memhandover::try_send_plain(socket, parts, descriptors_of(*this));
}

plain_facts facts_of(memhandover::message const& message) {
  if (message.form == 0) {
    throw no_message("another form");
  }
  field_reader from{message.bytes};
  plain_facts made{.form = from.number<parcel_form>(),
                   .is_alone = from.number<std::uint8_t>() != 0,
                   .is_suspect = from.number<std::uint8_t>() != 0,
                   .field_bytes = from.number<std::uint32_t>(),
                   .ticket = from.number<std::uint64_t>(),
                   .place = from.number<std::uint64_t>()};
  if (auto const expected = from.number<std::int64_t>(); expected != no_time) {
    made.expected = std::chrono::nanoseconds{expected};
  }
  if (made.field_bytes > message.bytes.size() - facts_bytes) {
    throw no_message("fewer fields than it says");
  }
  return made;
}

parcel wrap(infer_request const& request) {
  parcel made;
  made.form = parcel_form::request;
  made.ticket = request.ticket;
  made.is_alone = request.is_alone;
  made.is_suspect = request.is_suspect;
  made.expected = request.expected;
  auto& fields = made.fields;
  put_number(fields, request.priority);
  put_number(fields, request.mark);
  put_number(fields, std::int64_t{request.timeout ? request.timeout->count() : no_time});
  put_number(fields, std::int64_t{
                         request.arrival
                             ? std::chrono::nanoseconds{request.arrival->time_since_epoch()}.count()
                             : no_time});
  put_text(fields, request.model);
  put_text(fields, request.version);
  put_number(fields, static_cast<std::uint32_t>(request.outputs.size()));
  for (auto const& each : request.outputs) {
    put_text(fields, each);
  }
  wrap_tensors(request.inputs, made);
  return made;
}

parcel wrap(infer_result const& result) {
  parcel made;
  if (auto const* const failure = std::get_if<error>(&result)) {
    made.body = {{"type", "result"},
                 {"kind", static_cast<int>(failure->kind())},
                 {"error", std::string{failure->what()}.substr(0, longest_error)}};
    if (auto const retry_after = failure->retry_after()) {
      made.body["retry_after_ms"] = retry_after->count();
    }
    return made;
  }
  auto const& response = std::get<infer_response>(result);
  made.form = parcel_form::result;
  auto& fields = made.fields;
  put_number(fields, response.times.has_value());
  if (response.times) {
    put_number(fields, std::int64_t{response.times->queue.count()});
    put_number(fields, std::int64_t{response.times->compute.count()});
    put_number(fields, response.times->batch.requests);
    put_number(fields, response.times->batch.samples);
    put_number(fields, response.times->batch.is_first);
    put_number(fields, response.times->found_cold);
  }
  put_text(fields, response.model);
  put_text(fields, response.version);
  wrap_tensors(response.outputs, made);
  return made;
}

infer_request unwrap_request(memhandover::message const& message) {
  auto const facts = facts_of(message);
  if (facts.form != parcel_form::request) {
    throw no_message("another form");
  }
  auto fields = fields_of(message, facts);
  infer_request made;
  made.ticket = facts.ticket;
  made.is_alone = facts.is_alone;
  made.is_suspect = facts.is_suspect;
  made.expected = facts.expected;
  made.priority = fields.number<std::uint64_t>();
  made.mark = fields.number<std::uint64_t>();
  if (auto const timeout = fields.number<std::int64_t>(); timeout != no_time) {
    made.timeout = std::chrono::microseconds{timeout};
  }
  if (auto const arrival = fields.number<std::int64_t>(); arrival != no_time) {
    made.arrival = steady_clock::time_point{std::chrono::nanoseconds{arrival}};
  }
  made.model = fields.text();
  made.version = fields.text();
  made.outputs.resize(fields.count(sizeof(std::uint32_t)));
  for (auto& each : made.outputs) {
    each = fields.text();
  }
  made.inputs = unwrap_tensors(fields, bytes_of(message, facts));
  return made;
}

infer_result unwrap_result(memhandover::message const& message) {
  if (message.form == 0) {
    return checked([&]() -> infer_result {
      (void)message.body.at("error");
      return failure_in(message.body);
    });
  }
  auto const facts = facts_of(message);
  if (facts.form != parcel_form::result) {
    throw no_message("another form");
  }
  return response_in(message, facts);
}

batch_share batch_of(memhandover::message const& result) {
  auto fields = fields_of(result, facts_of(result));
  auto const has_times = fields.number<std::uint8_t>() != 0;
  if (!has_times) {
    return {};
  }
  (void)fields.take(2 * sizeof(std::int64_t));
  return {fields.number<std::uint32_t>(), fields.number<std::uint64_t>(),
          fields.number<std::uint8_t>() != 0};
}

parcel wrap_text(json body, std::string const& text) {
  parcel made;
  made.body = std::move(body);
  std::span<std::byte const> const part{reinterpret_cast<std::byte const*>(text.data()),
                                        text.size()};
  put_bytes({&part, 1}, made);
  return made;
}

std::string unwrap_text(memhandover::message const& message) {
  message_bytes from{message};
  auto const bytes = from.take(from.size());
  return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}

error lost_tensors() {
  return {error_kind::unavailable,
          "no more files may be opened for large tensors; raise the server's limit (ulimit -n), or "
          "lower server.max_connections"};
}

nlohmann::json failure_at(std::size_t place, error const& why) {
  return {{"place", place}, {"kind", static_cast<int>(why.kind())}, {"error", why.what()}};
}

error failure_in(json const& body) {
  auto const known = body.find("retry_after_ms");
  return {static_cast<error_kind>(body.value("kind", static_cast<int>(error_kind::internal))),
          body.value("error", "it did not say why"),
          known == body.end()
              ? std::nullopt
              : std::optional{std::chrono::milliseconds{known->get<std::int64_t>()}}};
}

}  // namespace sluice::server
