/// What the operator wants: where to listen, how large the pool is, what each model promises. Read
/// from a YAML file.
///
/// The reader finds every mistake in one pass; each is told as `file:line:column: path: what is
/// wrong, what would be right`. Keys, defaults and limits stand once, in detail/description.cpp;
/// the reader, the JSON Schema and the test of the shipped policy.schema.json all follow it.
/// docs/policy.md is the reference for operators.
///
///   try {
///     auto const wanted = policy::load("policy.yaml");
///     listen(wanted.server.host, wanted.server.port);
///   } catch (policy::policy_error const& wrong) {
///     std::cerr << wrong.what() << '\n';   // one line for each problem
///   }
///
/// Values are plain data, free to be shared between threads once loaded.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::policy {

using namespace sluice::literals;
using std::chrono::microseconds;

enum class pool_backend { automatic, host, cuda };
enum class pause_rule { on_launch, on_request, on_cold_start, never };
/// Whether what training keeps may go to the host.
enum class park_rule { never, if_needed };
enum class warm_mode { automatic, always, fixed };
enum class miss_action { queue, reject };
/// Whether clients may load and unload models.
enum class control_mode { none, explicit_requests };

/// As in the policy file: "auto", "on_request", ….
[[nodiscard]] std::string_view to_string(pool_backend value) noexcept;
[[nodiscard]] std::string_view to_string(warm_mode value) noexcept;

/// As the repository; both or none.
struct tls_policy {
  std::filesystem::path certificate_file, key_file;
};

struct server_policy {
  std::string host = "127.0.0.1";          ///< IP address, or localhost, to listen on
  std::uint16_t port = 8000;               ///< 0: any free one
  std::optional<std::uint16_t> grpc_port;  ///< the same for gRPC; nothing: there is none
  std::uint64_t max_body = 64_MiB;         ///< a larger request is refused
  std::uint64_t max_waiting_bodies = 1_GiB;
  /// Made absolute against the policy file's folder; empty: not given.
  std::filesystem::path model_repository;
  /// As the repository; empty: everybody may ask.
  std::filesystem::path token_file;
  tls_policy tls;
  std::filesystem::path access_log;  ///< "stderr", or a file as the repository; empty: none
  microseconds request_timeout = std::chrono::seconds{30};
  unsigned threads = 2;
  std::uint32_t max_connections = 16'384;
  std::uint32_t parallel_models = 4;
  bool spare_executor = true;
  control_mode model_control = control_mode::none;
};

/// A number of bytes, or a share of the memory that the machine or the device has free. Exactly one
/// is not zero.
struct memory_amount {
  std::uint64_t bytes = 0;
  double share = 0.0;  ///< in (0, 1]
};

struct pool_policy {
  pool_backend backend = pool_backend::automatic;
  int device = 0;                       ///< CUDA ordinal
  std::optional<memory_amount> memory;  ///< nothing: the broker chooses
  std::optional<std::uint64_t> chunk;   ///< nothing: by backend
};

/// Host memory for what training parks, and a disk beyond that.
struct host_copies_policy {
  std::uint64_t memory = 0;  ///< bytes; 0: none
  std::uint64_t disk = 0;    ///< likewise
  std::string disk_path{};   ///< an existing folder, if there is a disk
};

struct training_policy {
  pause_rule pause = pause_rule::on_launch;
  microseconds pause_hysteresis = std::chrono::milliseconds{2};
  double min_share = 0.05;                ///< in [0, 1]: of every second, without compute pauses
  std::optional<microseconds> run_ahead;  ///< nothing: follows the tightest promise
  bool allow_mps = false;
  park_rule park = park_rule::if_needed;
  std::uint32_t stay = 10;  ///< times what going and coming takes
  double resident_share =
      0.5;  ///< in [0, 1]: of every window, for a job that is parked again and again
  microseconds resident_window = std::chrono::minutes{1};
};

/// In every `window`, at least `percentile` of the requests are answered within `latency`; and at
/// least `attainment` of all windows keep that.
struct objective_policy {
  double percentile = 0.99;  ///< in (0, 1]
  microseconds latency{0};
  double attainment = 0.99;  ///< in (0, 1]
  microseconds window = std::chrono::minutes{5};
  // Of an engine's streams; 0: not promised.
  microseconds ttft{0};  ///< until their first token
  microseconds tbt{0};   ///< between two tokens

  bool operator==(objective_policy const&) const = default;
};

/// How long an idle model keeps its memory: chosen between the limits (automatic), for ever
/// (always), or for `max_idle` (fixed).
struct warm_policy {
  warm_mode mode = warm_mode::automatic;
  microseconds min_idle = std::chrono::seconds{1};
  microseconds max_idle = std::chrono::minutes{10};
  bool prewarm =
      true;  ///< loaded before requests that a timer sends; of `automatic`, and of no engine

  bool operator==(warm_policy const&) const = default;
};

/// How a request's engine is found: by its path alone, by the model that its body names, as OpenAI's clients send it, or by that which a
/// path of the Open Inference Protocol names.
enum class engine_api { http, openai, oip };
enum class engine_start { at_boot, on_demand };
/// Whose the memory is that it allocates with torch or CUDA: the pool's, or its own beside it.
enum class engine_memory { pool, own };
/// Whose memory its KV cache lies in, of vLLM with Sluice's plugin: the pool's, chunk by chunk, or as the engine has it.
enum class engine_cache { own, pool };

/// An inference server of its own, which the server starts and relays requests to.
struct engine_policy {
  std::vector<std::string> command;  ///< at least its program
  std::string ready;                 ///< path that is answered 2xx when it is; empty: it listens
  std::vector<std::string> routes;   ///< paths; with "/*" at the end all below
  engine_api api = engine_api::http;
  std::vector<std::string>
      served_names;  ///< of its models, beside its own, where these are asked for
  engine_start start = engine_start::on_demand;
  engine_memory memory = engine_memory::pool;
  engine_cache kv = engine_cache::own;
  std::map<std::string, std::string> env;  ///< beside the server's own
  microseconds start_timeout = std::chrono::minutes{10};
  microseconds max_silence = std::chrono::minutes{5};
  std::uint32_t max_requests = 1024;    ///< that it has at once
  std::uint32_t kept_connections = 64;  ///< that wait for the next request; 0: each has its own

  bool operator==(engine_policy const&) const = default;
  /// Whether its command or environment names `placeholder`, such as "{socket}".
  [[nodiscard]] bool names(std::string_view placeholder) const;
  /// Whether some of its memory is the pool's, so that it is counted, and goes when the engine rests.
  [[nodiscard]] bool is_tenant() const noexcept {
    return memory == engine_memory::pool || kv == engine_cache::pool;
  }
};

/// In an engine's command and environment: where it is to listen, of which it names one or none.
inline constexpr std::string_view port_placeholder{"{port}"}, socket_placeholder{"{socket}"};

struct model_policy {
  std::string name;
  objective_policy slo;
  warm_policy warm;
  std::uint32_t max_queue = 64;  ///< requests that may wait
  miss_action on_miss_predicted = miss_action::queue;
  std::optional<engine_policy> engine;  ///< nothing: a model of the repository

  bool operator==(model_policy const&) const = default;
};

struct scheduler_policy {
  microseconds tick = std::chrono::milliseconds{250};
  std::optional<std::uint64_t> reserve;  ///< bytes; nothing: chosen from the predicted cold starts
};

struct policy {
  std::filesystem::path file;  ///< where it was read from
  server_policy server;
  pool_policy pool;
  host_copies_policy host_copies;
  training_policy training;
  std::vector<model_policy> models;  ///< at least one; names differ
  scheduler_policy scheduler;
};

/// One mistake and its place. Lines and columns count from 1.
struct problem {
  std::string file;
  int line = 1;
  int column = 1;
  std::string path;  ///< e.g. "models[1].slo.latency"; empty for the file as a whole
  std::string message;

  /// `file:line:column: path: message`.
  [[nodiscard]] std::string text() const;
};

/// All mistakes of one file; `what()` has a line for each. Kind `not_found` if there is no such
/// file, else `invalid_argument`.
class policy_error : public error {
 public:
  policy_error(error_kind kind, std::vector<problem> problems);
  [[nodiscard]] std::vector<problem> const& problems() const noexcept { return problems_; }

 private:
  std::vector<problem> problems_;
};

/// Reads and checks a policy file. Throws `policy_error`.
[[nodiscard]] policy load(std::filesystem::path const& file);

/// What stands in a policy file. Throws `policy_error` if it cannot be read.
[[nodiscard]] std::string read_text(std::filesystem::path const& file);

/// The same as `load` for text; `file` stands in messages, and relative paths are resolved against its
/// folder.
[[nodiscard]] policy parse(std::string const& text, std::filesystem::path const& file);

/// Paths of the keys that two policies differ in, e.g. "server.port"; those of `models` are not compared.
[[nodiscard]] std::vector<std::string> differing_keys(policy const& one, policy const& other);

/// The JSON Schema (draft 2020-12) of a policy file. It knows keys, types and units; limits of
/// amounts with a unit and rules between keys are beyond it.
[[nodiscard]] nlohmann::ordered_json schema();

}  // namespace sluice::policy
