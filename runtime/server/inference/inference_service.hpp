/// What the HTTP endpoint asks of the part that runs models. Neither side knows the other's
/// insides: the endpoint has no torch, the service no sockets.
///
/// Tensors are dense, row-major, little-endian, as in the Open Inference Protocol V2.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/inference/tensor_bytes.hpp"

namespace sluice::server {

/// Element types of the protocol. BYTES elements are a little-endian u32 length followed by that
/// many bytes.
enum class datatype {
  boolean,
  uint8,
  uint16,
  uint32,
  uint64,
  int8,
  int16,
  int32,
  int64,
  fp16,
  bf16,
  fp32,
  fp64,
  bytes
};

/// One named tensor. `data.size()` is the product of `shape` times the element size (except BYTES).
struct tensor {
  std::string name;
  datatype type = datatype::fp32;
  std::vector<std::int64_t> shape;
  tensor_bytes data;
};

/// A tensor as the model's configuration describes it; −1 is a dimension free to vary.
struct tensor_spec {
  std::string name;
  datatype type = datatype::fp32;
  std::vector<std::int64_t> shape;
  /// What the model has in the place of `shape`, if that is another: with as many free dimensions, and
  /// as many elements between them.
  std::optional<std::vector<std::int64_t>> model_shape = std::nullopt;
};

struct model_metadata {
  std::string name;
  std::vector<std::string> versions;
  std::string platform;
  std::vector<tensor_spec> inputs;
  std::vector<tensor_spec> outputs;
};

/// A model of the repository that cannot be served, whoever asks for it.
struct unservable_model {
  std::string name;  ///< UTF-8
  error reason;
  bool is_wanted = false;  ///< the policy names it
};

/// Names a request of a service; none has 0.
using request_ticket = std::uint64_t;

struct infer_request {
  std::string model;
  std::string version;  ///< empty: the newest
  std::string id;       ///< echoed
  std::vector<tensor> inputs;
  std::vector<std::string> outputs;                  ///< names wanted; empty: all
  std::optional<std::chrono::microseconds> timeout;  ///< of the request as a whole
  /// Since when it counts; nothing: since it is given to the service.
  std::optional<std::chrono::steady_clock::time_point> arrival = std::nullopt;
  std::uint64_t priority = 0;  ///< 1 is the most urgent; 0: the model's own default
  /// It may not be computed together with others: something of its batch has ended a process.
  bool is_alone = false;
  /// Nothing may be computed beside it: it, or what was computed beside it, has ended a process.
  bool is_suspect = false;
  request_ticket ticket = 0;  ///< which the caller has chosen for it; 0: the service chooses one
  std::uint64_t mark =
      0;  ///< stands for its id where that does not go along (scheduler/retries.hpp)
  /// How long its answer will take from `arrival`, as whoever has it before the service expects; nothing: it is not foretold.
  std::optional<std::chrono::nanoseconds> expected = std::nullopt;
};

/// When a request's time is over that came at `arrival`, and may take as long as its `timeout` says, but no longer than `most`.
[[nodiscard]] inline std::chrono::steady_clock::time_point deadline_of(
    std::optional<std::chrono::microseconds> timeout, std::chrono::steady_clock::time_point arrival,
    std::chrono::microseconds most) {
  return arrival + std::min(timeout.value_or(most), most);
}

/// The computation that a request was part of.
struct batch_share {
  std::uint32_t requests = 1;
  std::uint64_t samples = 1;  ///< of all of them
  bool is_first = true;  ///< of those that are answered, so that each computation is counted once

  bool operator==(batch_share const&) const = default;
};

/// Where the time of an answered request went.
struct request_times {
  std::chrono::nanoseconds
      queue{};  ///< from its arrival until its computation began, a load included
  std::chrono::nanoseconds compute{};  ///< from then on until its outputs were there
  batch_share batch{};
  bool found_cold = false;  ///< it came while its model was not warm

  bool operator==(request_times const&) const = default;
};

struct infer_response {
  std::string model;
  std::string version;
  std::string id;
  std::vector<tensor> outputs;
  std::optional<request_times> times = std::nullopt;  ///< nothing: not measured
};

using infer_result = std::variant<infer_response, error>;

/// Whether a server, or a model, can be used now.
struct readiness {
  bool ready = true;
  std::string reason{};                                                 ///< why not
  std::optional<std::chrono::milliseconds> retry_after = std::nullopt;  ///< it is not before that

  explicit operator bool() const noexcept { return ready; }
};

class inference_service {
 public:
  virtual ~inference_service() = default;

  /// All models that the policy names can be served (cold or warm).
  [[nodiscard]] virtual readiness ready() const = 0;
  /// What the repository has besides `models`.
  [[nodiscard]] virtual std::vector<unservable_model> unservable() const { return {}; }
  [[nodiscard]] virtual std::vector<std::string> models() const = 0;
  /// The versions of one of `models`, oldest first, whether they can be served or not.
  [[nodiscard]] virtual std::vector<std::string> versions(std::string const& model) const {
    return metadata(model, "").versions;
  }
  /// Throws `not_found`, `unavailable` for one that cannot be served. Does not wake a cold model, nor touch its idle timer; the same holds for
  /// `model_ready`.
  [[nodiscard]] virtual model_metadata metadata(std::string const& model,
                                                std::string const& version) const = 0;
  /// Whether the weights are on the device; else the reason begins with the model's state. Throws `not_found`.
  [[nodiscard]] virtual readiness model_ready(std::string const& model,
                                              std::string const& version) const = 0;
  /// What its configuration says. Throws as `metadata`, `unsupported` where none is shown.
  [[nodiscard]] virtual nlohmann::json config(std::string const& /*model*/,
                                              std::string const& /*version*/) const {
    throw error{error_kind::unsupported, "this server does not show model configurations"};
  }
  /// Serves the model as its repository has it now; or where it is served already, what has changed of it. `parameters` are the
  /// request's. Waits until that is done. Throws `not_found`, what is wrong with the model, `unsupported` where models are not loaded on request.
  virtual void load(std::string const& /*model*/, nlohmann::json const& /*parameters*/) {
    throw not_on_request();
  }
  /// Serves it no more; what it has been asked by then is answered. Throws as `load`.
  virtual void unload(std::string const& /*model*/) { throw not_on_request(); }
  /// Runs a request; loads the model first if it is cold. `done` is called exactly once, on a
  /// thread of the service or before this returns. Returns what `cancel` takes.
  virtual request_ticket infer(infer_request request, std::function<void(infer_result)> done) = 0;
  /// Nobody waits for that answer any more. A request that waits is not run; `done` is called all the
  /// same, with `cancelled`. One that has been answered, or that there is not, is passed over.
  virtual void cancel(request_ticket which) = 0;
  /// Everything `sluice status` shows of the server, as docs/operations.md describes it.
  [[nodiscard]] virtual nlohmann::json status() const = 0;
  /// Triton's statistics of a model, of all its versions where none is given, or where `model` is empty of all models
  /// (docs/protocol.md). Throws `not_found`.
  [[nodiscard]] virtual nlohmann::json statistics(std::string const& model,
                                                  std::string const& version) const = 0;
  /// What Prometheus reads, in its text format. May take as long as `status`, and a second more.
  [[nodiscard]] virtual std::string metrics() const = 0;

 private:
  [[nodiscard]] static error not_on_request() {
    return {
        error_kind::unsupported,
        "this server does not load or unload models on request; it serves those that its policy "
        "names"};
  }
};

}  // namespace sluice::server
