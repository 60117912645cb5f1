#include "runtime/server/executor/parcel.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

using memhandover::unique_fd;
using nlohmann::json;
using std::chrono::steady_clock;

constexpr std::size_t most_bytes_beside = 32U << 10U;
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

void wrap_tensors(std::vector<tensor> const& tensors, char const* name, parcel& into) {
  std::vector<std::span<std::byte const>> parts;
  auto& described = into.body[name] = json::array();
  for (auto const& each : tensors) {
    described.push_back({{"name", each.name},
                         {"type", datatype_name(each.type)},
                         {"shape", each.shape},
                         {"bytes", each.data.size()}});
    parts.push_back(each.data.span());
  }
  put_bytes(parts, into);
}

/// The whole of it, for this process alone: what it writes there nobody else sees.
std::shared_ptr<std::byte> map(int file, std::size_t bytes) {
  auto* const begin = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  if (begin == MAP_FAILED) {
    throw memhandover::system_error("cannot map the tensors of a message");
  }
  return {static_cast<std::byte*>(begin), [bytes](std::byte* first) { ::munmap(first, bytes); }};
}

/// Of all tensors of a message, in order. Those in a file are used where they lie.
class message_bytes {
 public:
  explicit message_bytes(memhandover::message const& from) : from_(from) {
    if (from.descriptors.empty()) {
      size_ = from.bytes.size();
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
      mapped_ = map(file, size_);
    }
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  [[nodiscard]] tensor_bytes take(std::size_t bytes) {
    if (bytes == 0) {
      return {};
    }
    auto const begin = mapped_ ? aligned(taken_) : taken_;
    if (begin > size_ || bytes > size_ - begin) {
      throw no_message("fewer bytes than its tensors");
    }
    taken_ = begin + bytes;
    if (mapped_) {
      return {mapped_, {mapped_.get() + begin, bytes}};
    }
    auto const* const first = from_.bytes.data() + begin;
    return std::vector<std::byte>{first, first + bytes};
  }

 private:
  memhandover::message const& from_;
  std::shared_ptr<std::byte> mapped_;
  std::size_t size_ = 0, taken_ = 0;
};

std::vector<tensor> unwrap_tensors(memhandover::message const& from, char const* name) {
  std::vector<tensor> tensors;
  message_bytes bytes{from};
  for (auto const& each : from.body.at(name)) {
    auto const type = datatype_from_name(each.at("type").get<std::string>());
    if (!type) {
      throw no_message("a tensor of no type");
    }
    tensors.push_back({each.at("name"), *type, each.at("shape"), bytes.take(each.at("bytes"))});
  }
  return tensors;
}

/// Of the computation that an answer came from.
batch_share batch_share_in(json const& body) {
  auto const& is = body.at("batch");
  batch_share const share{is.at(0), is.at(1), is.at(2)};
  if (share.requests == 0) {
    throw no_message("a batch of no request");
  }
  return share;
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
  return memhandover::try_send_message(socket, body, descriptors_of(*this), bytes);
}

parcel wrap(infer_request const& request) {
  parcel made;
  made.body = {{"type", "infer"},
               {"model", request.model},
               {"version", request.version},
               {"ticket", request.ticket},
               {"outputs", request.outputs}};
  if (request.priority != 0) {
    made.body["priority"] = request.priority;
  }
  if (request.is_alone) {
    made.body["alone"] = true;
  }
  if (request.is_suspect) {
    made.body["suspect"] = true;
  }
  if (request.timeout) {
    made.body["timeout_us"] = request.timeout->count();
  }
  if (request.arrival) {
    made.body["arrival_ns"] = std::chrono::nanoseconds{request.arrival->time_since_epoch()}.count();
  }
  wrap_tensors(request.inputs, "inputs", made);
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
  made.body = {{"type", "result"}, {"model", response.model}, {"version", response.version}};
  if (response.times) {
    made.body["queue_ns"] = response.times->queue.count();
    made.body["compute_ns"] = response.times->compute.count();
    auto const& batch = response.times->batch;
    made.body["batch"] = {batch.requests, batch.samples, batch.is_first};
    made.body["cold"] = response.times->found_cold;
  }
  wrap_tensors(response.outputs, "outputs", made);
  return made;
}

infer_request unwrap_request(memhandover::message const& message) {
  return checked([&] {
    auto const& body = message.body;
    infer_request made;
    made.model = body.at("model");
    made.version = body.at("version");
    made.ticket = body.at("ticket");
    made.outputs = body.at("outputs");
    made.priority = body.value("priority", made.priority);
    made.is_alone = body.value("alone", made.is_alone);
    made.is_suspect = body.value("suspect", made.is_suspect);
    if (auto const timeout = body.find("timeout_us"); timeout != body.end()) {
      made.timeout = std::chrono::microseconds{timeout->get<std::int64_t>()};
    }
    if (auto const arrival = body.find("arrival_ns"); arrival != body.end()) {
      made.arrival =
          steady_clock::time_point{std::chrono::nanoseconds{arrival->get<std::int64_t>()}};
    }
    made.inputs = unwrap_tensors(message, "inputs");
    return made;
  });
}

infer_result unwrap_result(memhandover::message const& message) {
  return checked([&]() -> infer_result {
    auto const& body = message.body;
    if (body.contains("error")) {
      return failure_in(body);
    }
    infer_response made{
        body.at("model"), body.at("version"), {}, unwrap_tensors(message, "outputs")};
    if (body.contains("queue_ns")) {
      made.times = {.queue = std::chrono::nanoseconds{body.at("queue_ns").get<std::int64_t>()},
                    .compute = std::chrono::nanoseconds{body.at("compute_ns").get<std::int64_t>()},
                    .batch = batch_share_in(body),
                    .found_cold = body.at("cold")};
    }
    return made;
  });
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

error failure_in(json const& body) {
  auto const known = body.find("retry_after_ms");
  return {static_cast<error_kind>(body.value("kind", static_cast<int>(error_kind::internal))),
          body.value("error", "it did not say why"),
          known == body.end()
              ? std::nullopt
              : std::optional{std::chrono::milliseconds{known->get<std::int64_t>()}}};
}

}  // namespace sluice::server
