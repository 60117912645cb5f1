#include "runtime/policy/detail/description.hpp"

#include <array>

namespace sluice::policy {
namespace {

using namespace std::chrono_literals;
using detail::key;
using detail::key_visitor;
using detail::percent_sign;
using detail::text_rule;

constexpr std::array<std::string_view, 3> backend_names{"auto", "host", "cuda"};
constexpr std::array<std::string_view, 4> pause_names{"on_launch", "on_request", "on_cold_start",
                                                      "never"};
constexpr std::array<std::string_view, 2> park_names{"never", "if_needed"};
constexpr std::array<std::string_view, 3> warm_names{"auto", "always", "fixed"};
constexpr std::array<std::string_view, 2> miss_names{"queue", "reject"};
constexpr std::array<std::string_view, 3> api_names{"http", "openai", "oip"};
constexpr std::array<std::string_view, 2> start_names{"at_boot", "on_demand"};
constexpr std::array<std::string_view, 2> engine_memory_names{"pool", "own"};
constexpr std::array<std::string_view, 2> engine_cache_names{"own", "pool"};
constexpr std::array<std::string_view, 2> control_names{"none", "explicit"};

// The name becomes a folder of the model repository and a part of URLs.
constexpr text_rule name_rule{"[A-Za-z0-9_][A-Za-z0-9._-]*",
                              "must be letters, digits, \"_\", \"-\" and \".\", not beginning with "
                              "\"-\" or \".\", as the model's folder is called"};
constexpr text_rule host_rule{R"(localhost|[0-9.]+|[0-9A-Fa-f:.]+:[0-9A-Fa-f:.]*(%[^\s/]+)?)",
                              "must be an IP address, or localhost"};
constexpr text_rule path_rule{".+", "must be the path of a folder"};
constexpr text_rule file_rule{".+", "must be the path of a file"};

constexpr text_rule word_rule{R"([\s\S]+)", "must be a text that is not empty"};
constexpr text_rule ready_rule{"/[!-~]*", "must be a path that begins with \"/\", without blanks"};
constexpr text_rule route_rule{
    R"(/|/\*|(/[A-Za-z0-9._~!$&'()+,;=:@-]+)+(/\*)?)",
    "must be a path that begins with \"/\", with \"/*\" at its end for all that lies below"};
constexpr text_rule served_name_rule{R"([^\x00-\x1F\x7F]{1,512})",
                                     "must be a text of at most 512 bytes without control "
                                     "characters"};
constexpr text_rule variable_rule{"[A-Za-z_][A-Za-z0-9_]*",
                                  "must be the name of a variable: letters, digits and \"_\", not "
                                  "beginning with a digit"};

/// Below 1% is a fraction written for a percentage: 0.99 for 99%.
constexpr detail::limits<double> promised_share{0.01, 1.0};

template <class Enum>
void choose(key_visitor& visitor, key const& what, Enum& value,
            std::span<std::string_view const> names) {
  auto index = static_cast<std::size_t>(value);
  visitor.choice(what, index, names);
  value = static_cast<Enum>(index);
}

template <class Number>
void number(key_visitor& visitor, key const& what, Number& value,
            detail::limits<std::int64_t> allowed) {
  std::int64_t wide = value;
  visitor.whole_number(what, wide, allowed);
  value = static_cast<Number>(wide);
}

void describe_file(key_visitor& v, key const& what, std::filesystem::path& into) {
  auto file = into.string();
  v.text(what, file, file_rule);
  into = file;
}

void describe_server(key_visitor& v, server_policy& into) {
  v.text({"host", "IP address, or localhost, to listen on.", "127.0.0.1"}, into.host, host_rule);
  number(v, {"port", "TCP port to listen on; 0 takes any free one.", "8000"}, into.port,
         {0, 65535});
  constexpr std::int64_t none = -1;
  std::int64_t grpc_port = into.grpc_port ? *into.grpc_port : none;
  v.whole_number({"grpc_port",
                  "TCP port to listen on for gRPC; 0 takes any free one. Without it there is no "
                  "gRPC.",
                  "8001"},
                 grpc_port, {0, 65535});
  if (grpc_port != none) into.grpc_port = static_cast<std::uint16_t>(grpc_port);
  v.bytes({"max_body", "Largest request body; a larger one is answered with 413.", "64MiB"},
          into.max_body, {1_KiB, 64_GiB});
  v.bytes({"max_waiting_bodies",
           "Of large request bodies that are being read, in all; beyond, one more is answered with "
           "503.",
           "1GiB"},
          into.max_waiting_bodies, {1_KiB, 1024_GiB});
  auto folder = into.model_repository.string();
  v.text({"model_repository",
          "Folder of the models, in Triton's layout; relative to the policy file.", "models"},
         folder, path_rule);
  into.model_repository = folder;
  describe_file(
      v,
      {"token_file",
       "File with the tokens of which clients must send one as Authorization: Bearer TOKEN, "
       "one on each line; relative to the policy file.",
       "tokens"},
      into.token_file);
  v.section({"tls", "With what the endpoint speaks TLS; without it connections are plain.",
             "{certificate_file: cert.pem, key_file: key.pem}"},
            [&into](key_visitor& tls) {
              describe_file(tls,
                            {"certificate_file",
                             "PEM file with the certificate, and behind it those that vouch for "
                             "it; relative to the policy file.",
                             "cert.pem", true},
                            into.tls.certificate_file);
              describe_file(tls,
                            {"key_file",
                             "PEM file with the certificate's key, unencrypted; relative to the "
                             "policy file.",
                             "key.pem", true},
                            into.tls.key_file);
            });
  describe_file(
      v,
      {"access_log",
       "Where each request gets a line: stderr, or a file; relative to the policy file.", "stderr"},
      into.access_log);
  v.duration({"request_timeout", "Longest time for a request, loading its model included.", "30s"},
             into.request_timeout, {1ms, 1h});
  number(v, {"threads", "Threads that read requests and write answers.", "2"}, into.threads,
         {1, 256});
  number(v,
         {"max_connections",
          "Connections open at once; one more takes the place of the one that is idle longest.",
          "16384"},
         into.max_connections, {1, 1'000'000});
  number(
      v,
      {"parallel_models", "Models that compute at once at most, each one request at a time.", "4"},
      into.parallel_models, {1, 64});
  v.boolean({"spare_executor",
             "Whether a second process has its libraries loaded, to take the place of the one that "
             "computes when that ends.",
             "true"},
            into.spare_executor);
  choose(
      v,
      {"model_control",
       "Whether clients may load and unload the models that this file names: none, or by explicit "
       "requests.",
       "none"},
      into.model_control, control_names);
}

void describe_pool(key_visitor& v, pool_policy& into) {
  choose(v, {"backend", "Where the pool's memory is; auto takes a GPU if there is one.", "auto"},
         into.backend, backend_names);
  number(v, {"device", "CUDA ordinal of the GPU.", "0"}, into.device, {0, 63});
  v.memory(
      {"memory",
       "Size of the pool: an amount, or a percentage of the memory that is free when the pool is "
       "created; auto leaves the choice to the broker.",
       "40GiB"},
      into.memory, {4_KiB, 1024 * 1024_GiB});
  v.bytes_or_auto(
      {"chunk", "Size of one chunk; auto is 64MiB on CUDA and 2MiB on the host.", "64MiB"},
      into.chunk, {4_KiB, 16_GiB});
}

void describe_host_copies(key_visitor& v, host_copies_policy& into) {
  v.bytes({"memory", "Host memory for what jobs park, taken when the broker starts; 0 for none.",
           "64GiB"},
          into.memory, {0, 1024 * 1024_GiB});
  v.bytes(
      {"disk", "Disk for what the memory has no room for, kept when the broker starts; 0 for none.",
       "256GiB"},
      into.disk, {0, 1024 * 1024_GiB});
  v.text(
      {"disk_path", "Folder on that disk, in which the room is kept; relative to the policy file.",
       "/var/lib/sluice"},
      into.disk_path, path_rule);
}

void describe_training(key_visitor& v, training_policy& into) {
  choose(v, {"pause", "When training's launches are held.", "on_launch"}, into.pause, pause_names);
  v.duration({"pause_hysteresis",
              "How long a pause outlasts the last request in flight, with on_request.", "2ms"},
             into.pause_hysteresis, {0us, 1s});
  v.percentage(
      {"min_share", "Share of every second in which compute pauses do not hold training.", "5%"},
      into.min_share, {0.0, 1.0}, percent_sign::required);
  v.duration_or_auto({"run_ahead",
                      "How much predicted work training may put on the device in advance while a "
                      "server is there; auto follows the tightest promise.",
                      "200us"},
                     into.run_ahead, {1us, 1s});
  v.boolean(
      {"allow_mps",
       "Whether to share a GPU under MPS, where a fault in one process ends all of them.", "false"},
      into.allow_mps);
  choose(v,
         {"park", "Whether memory that a job keeps goes to host copies when a cold model needs it.",
          "if_needed"},
         into.park, park_names);
  number(v,
         {"stay",
          "How long a job that has come back is not parked again, in times of what going and "
          "coming took.",
          "10"},
         into.stay, {1, 1000});
  v.percentage({"resident_share",
                "Share of every resident_window in which a job that is parked again and again has "
                "its memory.",
                "50%"},
               into.resident_share, {0.0, 1.0}, percent_sign::required);
  v.duration({"resident_window", "Length of the windows of resident_share.", "1m"},
             into.resident_window, {1s, 1h});
}

void describe_engine(key_visitor& v, engine_policy& into) {
  v.texts({"command",
           "The program and its arguments, run in the policy file's folder; {port} stands for the "
           "TCP port on 127.0.0.1 where it is to listen, {socket} for the path of a Unix socket.",
           "[python3, server.py, --port, \"{port}\"]", true},
          into.command, word_rule);
  v.text({"ready",
          "Path that the engine answers with 2xx when it can be asked; without it, it can as soon "
          "as it listens.",
          "/health"},
         into.ready, ready_rule);
  v.texts({"routes",
           "Paths whose requests it gets; with /* at the end all that lies below. Of several that "
           "fit the longest counts. Needed with api http.",
           "[/v1/completions, /chat/*]"},
          into.routes, route_rule);
  choose(v,
         {"api",
          "How its requests are found; http: by their path alone; openai: below /v1, by the model "
          "that their body names, and by their path; oip: below /v2/models, by the model that "
          "their path names, and by their path.",
          "http"},
         into.api, api_names);
  v.texts({"served_names",
           "What its models are called in requests, beside the name; with api openai or oip.",
           "[meta-llama/Llama-3.1-8B]"},
          into.served_names, served_name_rule);
  choose(v, {"start", "When it is started: with the server, or by its first request.", "on_demand"},
         into.start, start_names);
  choose(v,
         {"memory",
          "Whether its memory is the pool's, so that it is counted, and parked when the engine is "
          "idle, or its own beside the pool.",
          "pool"},
         into.memory, engine_memory_names);
  choose(v,
         {"kv",
          "Of vLLM with Sluice's plugin: whether its KV cache takes chunks of the pool as requests "
          "need them, or is as the engine has it.",
          "own"},
         into.kv, engine_cache_names);
  v.named_texts(
      {"env", "Variables of its environment, beside the server's own.", "{HF_HOME: /srv/models}"},
      into.env, variable_rule);
  v.duration({"start_timeout", "How long a start may take until the engine is ready.", "10m"},
             into.start_timeout, {100ms, 24h});
  v.duration({"max_silence",
              "How long nothing may come from either side within an answer or a connection that "
              "has become a websocket.",
              "5m"},
             into.max_silence, {100ms, 24h});
  number(v,
         {"max_requests", "Requests that the engine has at once; others wait (max_queue).", "1024"},
         into.max_requests, {1, 1'000'000});
  number(v,
         {"kept_connections",
          "Connections to the engine that stay open for the next request; 0: each request has one "
          "of its own.",
          "64"},
         into.kept_connections, {0, 4096});
}

void describe_model(key_visitor& v, model_policy& into) {
  v.text({"name", "The model's folder in the model repository.", "resnet50", true}, into.name,
         name_rule);
  v.section(
      {"slo", "The promise for this model's response times.", "{latency: 150ms}", true},
      [&into](key_visitor& slo) {
        slo.percentage(
            {"percentile", "Share of a window's requests that are answered in time.", "99%"},
            into.slo.percentile, promised_share, percent_sign::optional);
        slo.duration(
            {"latency", "Response time within which a request counts as in time.", "150ms", true},
            into.slo.latency, {1us, 1h});
        slo.percentage({"attainment", "Share of all windows in which the percentile holds.", "99%"},
                       into.slo.attainment, promised_share, percent_sign::required);
        slo.duration({"window", "Length of the windows.", "5m"}, into.slo.window, {1s, 24h});
        slo.duration({"ttft",
                      "Time within which the first token of a stream counts as in time; of engines "
                      "with api openai.",
                      "500ms"},
                     into.slo.ttft, {1us, 1h});
        slo.duration({"tbt",
                      "Time within which a token counts as in time after the one before it in its "
                      "stream; of engines with api openai.",
                      "50ms"},
                     into.slo.tbt, {1us, 1h});
      });
  v.section({"warm", "How long the model keeps its memory without requests.", "{mode: auto}"},
            [&into](key_visitor& warm) {
              choose(warm,
                     {"mode",
                      "auto chooses the idle timeout against the promise, always never gives the "
                      "memory back, fixed uses max_idle.",
                      "auto"},
                     into.warm.mode, warm_names);
              warm.duration({"min_idle", "Shortest idle timeout that auto may choose.", "1s"},
                            into.warm.min_idle, {0us, 24h});
              warm.duration({"max_idle", "Longest idle timeout that auto may choose.", "10m"},
                            into.warm.max_idle, {0us, 24h});
              warm.boolean({"prewarm",
                            "Whether auto may have the model gone between requests that a timer "
                            "sends, and loaded before the next ones are due.",
                            "true"},
                           into.warm.prewarm);
            });
  number(
      v,
      {"max_queue", "Requests that may wait for the model; one more is answered with 503.", "64"},
      into.max_queue, {1, 1'000'000});
  choose(v,
         {"on_miss_predicted", "What happens to a request that is predicted to be late.", "queue"},
         into.on_miss_predicted, miss_names);
  v.section({"engine",
             "An inference server of its own, in the place of a model of the repository: how it is "
             "started, and which requests it gets.",
             "{command: [python3, server.py], routes: [/v1/*]}"},
            [&into](key_visitor& engine) {
              if (!into.engine) into.engine.emplace();
              describe_engine(engine, *into.engine);
            });
}

void describe_scheduler(key_visitor& v, scheduler_policy& into) {
  v.duration({"tick", "Time between two decisions.", "250ms"}, into.tick, {10ms, 1min});
  v.bytes_or_auto(
      {"reserve", "Free memory kept for cold starts; auto follows the predicted cold starts.",
       "512MiB"},
      into.reserve, {0, 1024 * 1024_GiB});
}

}  // namespace

std::string_view to_string(pool_backend value) noexcept {
  return backend_names[static_cast<std::size_t>(value)];
}
std::string_view to_string(warm_mode value) noexcept {
  return warm_names[static_cast<std::size_t>(value)];
}

void detail::describe(key_visitor& visitor, policy& into) {
  std::int64_t version = format_version;
  visitor.whole_number({"version", "Version of this format.", "1", true}, version,
                       {format_version, format_version});
  visitor.section({"server", "The HTTP endpoint and the model repository.", "{port: 8000}"},
                  [&into](key_visitor& v) { describe_server(v, into.server); });
  visitor.section({"pool", "The memory that training and serving share.", "{memory: 40GiB}"},
                  [&into](key_visitor& v) { describe_pool(v, into.pool); });
  visitor.section(
      {"host_copies", "Copies in the host's memory of what is parked.", "{memory: 64GiB}"},
      [&into](key_visitor& v) { describe_host_copies(v, into.host_copies); });
  visitor.section({"training", "What serving may ask of training.", "{pause: on_launch}"},
                  [&into](key_visitor& v) { describe_training(v, into.training); });
  visitor.list({"models", "The models to serve, each with its promise.",
                "[{name: resnet50, slo: {latency: 150ms}}]", true},
               [&into](key_visitor& v) { describe_model(v, into.models.emplace_back()); });
  visitor.section({"scheduler", "How decisions are taken.", "{tick: 250ms}"},
                  [&into](key_visitor& v) { describe_scheduler(v, into.scheduler); });
}

}  // namespace sluice::policy
