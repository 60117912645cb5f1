// Texts of what operators write: an input's first byte says whether the rest is a config.pbtxt or a policy.

#include <nlohmann/json.hpp>
#include <string>

#include "runtime/policy/policy.hpp"
#include "runtime/server/repository/model_config.hpp"
#include "tests/runtime/server_fuzz/fuzz_target.hpp"

namespace sluice::server::fuzzing {

std::vector<std::string> seeds() {
  return {R"(0name: "m" platform: "pytorch_libtorch" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 0x10 ] }, { name: "r" data_type: TYPE_INT64 dims: [ ] } ]
output < name: 'y' data_type: TYPE_BOOL dims: 1 dims: 2 >
version_policy { specific { versions: [ 1, 2 ] } }
parameters { key: "k\n\x41" value: { string_value: "v" } }
)",
          R"(0backend: "pytorch" max_batch_size: 8
input: { name: "x" data_type: TYPE_FP32 dims: -1 reshape { shape: [ 1, -1 ] } }
output { name: "y" data_type: TYPE_STRING dims: [ ] }
dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 100 priority_levels: 2 default_priority_level: 1
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 }
  priority_queue_policy { key: 2 value { max_queue_size: 7 allow_timeout_override: true } } }
model_warmup [ { name: "w" batch_size: 1 count: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 random_data: true } } } ]
)",
          R"(1version: 1
server: {port: 8000, model_repository: models, max_body: 64MiB, request_timeout: 30s, model_control: explicit}
pool: {backend: host, memory: 64MiB}
scheduler: {tick: 20ms}
models:
  - name: encoder
    slo: {percentile: 99%, latency: 500ms, attainment: 95%, window: 5m}
    warm: {mode: fixed, max_idle: 10m}
)"};
}

void run_one(std::string_view input) {
  if (input.empty()) return;
  std::string const text{input.substr(1)};
  try {
    if (input[0] % 2 == 0) {
      auto const config = read_model_config(text, "f");
      require(!config.inputs.empty() && !config.outputs.empty(), "a model has inputs and outputs",
              text);
      require(nlohmann::json::accept(config.json.dump()), "a configuration is shown as JSON", text);
    } else {
      auto const read = policy::parse(text, "/f/policy.yaml");
      require(policy::differing_keys(read, policy::parse(text, "/f/policy.yaml")).empty(),
              "a policy is read in one way", text);
    }
  } catch (error const& refusal) {
    require(
        refusal.kind() == error_kind::invalid_argument || refusal.kind() == error_kind::unsupported,
        "a file is refused for what it says", refusal.what());
    require(!std::string_view{refusal.what()}.empty(), "a refusal says why", text);
  }
}

}  // namespace sluice::server::fuzzing
