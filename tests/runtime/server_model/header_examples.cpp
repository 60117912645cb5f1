/// The examples in the headers of runtime/server/, word for word: compiled, never run.
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/broker/runtime_folder.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "runtime/policy/policy.hpp"
#include "runtime/server/experience/experience_file.hpp"
#include "runtime/server/experience/experience_text.hpp"
#include "runtime/server/hosting/absent_model.hpp"
#include "runtime/server/hosting/activation_memory.hpp"
#include "runtime/server/hosting/batch_choice.hpp"
#include "runtime/server/hosting/compute_lease.hpp"
#include "runtime/server/hosting/detail/compute_pause.hpp"
#include "runtime/server/hosting/gate_memory.hpp"
#include "runtime/server/hosting/image_file.hpp"
#include "runtime/server/hosting/latency_window.hpp"
#include "runtime/server/hosting/launch_listener.hpp"
#include "runtime/server/hosting/model_file.hpp"
#include "runtime/server/hosting/model_host.hpp"
#include "runtime/server/hosting/warmup_requests.hpp"
#include "runtime/server/http/endpoint.hpp"
#include "runtime/server/metrics.hpp"
#include "runtime/server/model_account.hpp"
#include "runtime/server/pool_watch.hpp"
#include "runtime/server/repository_control.hpp"
#include "runtime/server/server_setup.hpp"
#include "runtime/server/service.hpp"
#include "runtime/server/status_socket.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"

namespace sluice::server::header_examples {

using namespace detail;
using namespace std::chrono_literals;
using memhandover::serving_pool;

void of_activation_memory(std::shared_ptr<serving_pool> const& pool) {
  activation_memory memory{pool, activation_memory::freed::kept};
  auto* const address = memory.allocate(20_MiB);  // may take chunks from training
  memory.free(address);
  memory.give_back();  // what was kept for the next computation
}

void of_gate_memory(std::shared_ptr<activation_memory> const& memory) {
  if (answer_from_pool(memory)) {
    // … what is allocated on the pool's GPU from here on is the pool's …
  }
}

void of_compute_pause(std::shared_ptr<serving_pool> const& pool,
                      compute_pause::clock::time_point soon) {
  compute_pause pause{pool, 0.05};
  pause.want();
  pause.attend();
  pause.release();
  pause.release_at(soon);
}

void of_experience_text(experiences const& all) {
  auto const text = text_of(all);
  read_experiences(text).models;
}

void of_experience_file(std::string const& stands_for, scheduler::model_controller& controller,
                        experience_file::clock::time_point now,
                        std::vector<model_experience> const& all) {
  experience_file left{"/run/user/1000/sluice/models-0.experience"};
  if (auto const found = left.find("resnet/1", stands_for)) {
    controller.recall(found->learnt, found->age, now);
  }
  if (left.is_due(now)) {
    left.keep(all);
  }
}

void of_image_file(std::vector<std::byte> const& bytes, std::byte* destination) {
  image_file image;
  auto offset = image.append(bytes);
  image.read(offset, bytes.size(), destination);
}

void of_model_file(std::uint64_t offset, std::byte* destination, std::size_t bytes) {
  model_file file{"/models/add/1/model.pt"};
  auto words = file.fingerprint();
  file.read(offset, {destination, bytes});
}

void of_model_account(infer_result const& result) {
  model_account account{"add", "1"};
  account.on_answer(result, 3ms, 1);
  account.statistics().success.count;
}

void of_metrics(model_account const& account, model_executor const& executor, pool_watch& pool) {
  metrics_of({account.statistics()}, executor.status(), pool.look(1s));
}

void of_status_socket(model_service const& service, repository_control& control) {
  status_socket const socket{
      memhandover::status_socket_of("", 0),
      {{"status", [&] { return service.status(); }}, {"reload", [&] { return control.reload(); }}}};
}

void of_repository_control(repository_control::start const& started, std::string const& text,
                           policy::policy const& wanted, model_choice const& choice,
                           std::filesystem::path const& program) {
  repository_control control{started, text, wanted, choice};
  model_service service{offered(choice.served), choice.unservable};
  remote_executor executor{{.program = program, .first = control.orders()}};
  control.attach(executor, service);
  control.reload()["added"];
}

void of_pool_watch() {
  pool_watch pool{[] { return memhandover::query_status(""); }, "127.0.0.1:8000"};
  if (auto const seen = pool.look(1s)) {
  }
}

void of_compute_lease(std::shared_ptr<serving_pool> const& pool) {
  compute_lease lease{pool, 0.05, compute_lease::change_on_gpu};
  lease.begins();
  lease.drained(true);
}

void of_launch_listener(std::shared_ptr<compute_lease> const& lease) {
  if (launch_listener const listener{lease}; listener.listens()) {
    // … from here on each burst of launches claims the device …
  }
}

void of_latency_window() {
  latency_window warm;
  warm.add(3ms);
  warm.summary();
}

void of_model_host(host_options const& options, std::shared_ptr<serving_pool> pool,
                   std::vector<served_model> models, infer_request request,
                   model_host::completion const& reply) {
  model_host host{options, std::move(pool), std::move(models)};
  host.submit(0, std::move(request), [&](infer_result result) { reply(std::move(result)); });
  if (!host.stop(10s)) {
  }
}

void of_batch_choice(std::vector<waiting_request> const& line, waiting_request::time_point now) {
  batching_rules const rules{.max_batch_size = 8, .is_dynamic = true, .max_queue_delay = 2ms};
  auto const next = choose_batch(line, rules, now, 5ms);
  if (next.taken.empty()) {
  }
}

void of_warmup_requests(model_entry const& entry, model_host& host,
                        model_host::completion const& reply) {
  for (auto& request : warmup_requests(entry.warmup, entry.max_batch_size > 0)) {
    host.submit(0, std::move(request), reply);
  }
}

void of_absent_model(std::vector<served_model>& models, error const& why) {
  models.push_back({"broken", "1", std::make_unique<absent_model>(why), {}});
}

void of_server_setup(
    policy::policy const& policy, std::shared_ptr<serving_pool> const& pool,
    std::function<std::unique_ptr<hosted_model>(model_entry const&)> const& prepare) {
  auto const choice = choose_models(policy, read_repository({policy.server.model_repository}));
  model_service service{offered(choice.served), choice.unservable};
  std::vector<served_model> models;
  for (auto const& each : choice.served) {
    models.push_back(served(each, prepare(each.entry), policy, pool->shape().backend));
  }
  model_host host{host_options_of(policy), pool, std::move(models)};
}

void of_service(std::vector<offered_model> const& offered, endpoint_options const& options,
                model_host& host) {
  model_service service{offered};
  endpoint http{options, service};
  service.attach(host, http.address());
}

}  // namespace sluice::server::header_examples

#pragma GCC diagnostic pop
