#include "runtime/server/metrics.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <utility>

#include "runtime/server/engines/engine_state.hpp"
#include "runtime/server/engines/token_account.hpp"
#include "runtime/telemetry/metrics_text.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;
using telemetry::metrics_text;
using labels = metrics_text::label_list;
using kind = metrics_text::kind;

constexpr double us_to_s = 1e-6;
constexpr double ms_to_s = 1e-3;

json const& at(json const& from, char const* name) {
  static json const none;
  auto const found = from.is_object() ? from.find(name) : from.end();
  return found == from.end() ? none : *found;
}

std::string text_of(json const& from, char const* name) {
  auto const& found = at(from, name);
  return found.is_string() ? found.get<std::string>() : std::string{};
}

/// Whatever is not known has no sample.
void sample(metrics_text& to, labels const& of, json const& value, double unit = 1.0) {
  if (value.is_number()) {
    to.sample(of, value.get<double>() * unit);
  }
}

double microseconds(std::chrono::nanoseconds value) {
  return std::chrono::duration<double, std::micro>{value}.count();
}

labels labels_of(model_statistics const& model) {
  return {{"model", model.model}, {"version", model.version}};
}
labels labels_of(json const& model) {
  return {{"model", text_of(model, "name")}, {"version", text_of(model, "version")}};
}

labels with(labels of, std::string name, std::string value) {
  of.emplace_back(std::move(name), std::move(value));
  return of;
}

void add_tritons(metrics_text& to, std::vector<model_statistics> const& models) {
  auto const each = [&](char const* name, char const* help, auto const& value) {
    to.family(name, kind::counter, help);
    for (auto const& model : models) {
      to.sample(labels_of(model), value(model));
    }
  };
  each("nv_inference_request_success", "Requests answered 200.",
       [](auto const& is) { return static_cast<double>(is.success.count); });
  to.family("nv_inference_request_failure", kind::counter,
            "Requests answered otherwise, by reason.");
  for (auto const& model : models) {
    for (std::size_t reason = 0; reason < failure_reason_names.size(); ++reason) {
      to.sample(with(labels_of(model), "reason", std::string{failure_reason_names.at(reason)}),
                static_cast<double>(model.failures.at(reason)));
    }
  }
  each("nv_inference_count", "Samples of the requests answered 200.",
       [](auto const& is) { return static_cast<double>(is.inferences); });
  each("nv_inference_exec_count", "Computations, of a batch of requests or of one.",
       [](auto const& is) { return static_cast<double>(is.computed()); });
  each("nv_inference_request_duration_us",
       "Microseconds from arrivals to answers, of requests answered 200.",
       [](auto const& is) { return microseconds(is.success.total); });
  each("nv_inference_queue_duration_us",
       "Microseconds from arrivals to the beginning of computations, of requests answered 200.",
       [](auto const& is) { return microseconds(is.queue.total); });
  each("nv_inference_compute_infer_duration_us",
       "Microseconds of computations, until outputs were there, of requests answered 200.",
       [](auto const& is) { return microseconds(is.compute.total); });
}

void add_durations(metrics_text& to, std::vector<model_statistics> const& models) {
  to.family("sluice_request_duration_seconds", kind::histogram,
            "From arrivals to answers, of requests answered 200, by whether they found their model "
            "warm.");
  using distribution = model_statistics::distribution;
  for (auto const& model : models) {
    auto const add = [&](char const* start, distribution const& seen) {
      to.sample(with(labels_of(model), "start", start),
                {.bounds = distribution::bounds,
                 .counts = seen.counts,
                 .sum = std::chrono::duration<double>{seen.total}.count()});
    };
    add("warm", model.warm);
    add("cold", model.cold);
  }
}

void add_models(metrics_text& to, json const& models) {
  static constexpr std::array<char const*, 5> states{"cold", "loading", "warm", "releasing",
                                                     "failed"};
  to.family("nv_inference_pending_request_count", kind::gauge,
            "Requests that wait for their computation.");
  for (auto const& model : models) {
    if (auto const& waiting = at(model, "queue"); waiting.is_number()) {
      auto const computing = model.value("computing", 0.0);
      to.sample(labels_of(model), std::max(waiting.get<double>() - computing, 0.0));
    }
  }
  to.family("sluice_model_state", kind::gauge, "1 for the state that the model is in.");
  for (auto const& model : models) {
    for (auto const* const state : states) {
      to.sample(with(labels_of(model), "state", state), text_of(model, "state") == state ? 1 : 0);
    }
  }
  auto const each = [&](char const* name, kind what, char const* help, char const* field) {
    to.family(name, what, help);
    for (auto const& model : models) {
      sample(to, labels_of(model), at(model, field));
    }
  };
  each("sluice_model_weights_bytes", kind::gauge, "Memory of the pool that the weights take.",
       "bytes");
  each("sluice_model_attainment_required_ratio", kind::gauge,
       "Share of requests in time that the promise needs.", "required_attainment");
  each("sluice_model_attainment_predicted_ratio", kind::gauge,
       "Share of requests in time that is predicted.", "predicted_attainment");
  each("sluice_model_attainment_observed_ratio", kind::gauge,
       "Share of requests in time that was measured within the promise's window.",
       "observed_attainment");
  each("sluice_model_attainment_uncorrected_ratio", kind::gauge,
       "Share of the admitted requests in time that the model of the queue predicts by itself.",
       "predicted_uncorrected");
  each("sluice_model_attainment_correction_log_odds", kind::gauge,
       "What is added to the log odds of that, since answers have belied it; 0: nothing.",
       "correction_log_odds");
  each("sluice_model_admitted_ratio", kind::gauge,
       "Share of requests that is admitted, with on_miss_predicted: reject.", "admitted_share");
  each("sluice_model_cold_starts_total", kind::counter,
       "Loads of the model for requests, since the executor started.", "cold_starts");
  each("sluice_model_prewarms_total", kind::counter,
       "Loads of the model before anybody asked, since the executor started.", "prewarms");
  each("sluice_model_prewarms_used_total", kind::counter,
       "Of those, the ones after which somebody asked before the model went again.",
       "prewarms_used");
  each("sluice_model_prewarms_omitted_total", kind::counter,
       "Times that the model was to be loaded before anybody asked, and was not: others wanted "
       "memory, or to be loaded.",
       "prewarms_omitted");
  each("sluice_model_ended_executors_total", kind::counter, "Executors that the model has ended.",
       "ended_executors");
  to.family("sluice_model_refused_requests_total", kind::counter,
            "Requests refused at once: they would have missed their own time, since the server "
            "started, or the promise, since the executor started.");
  for (auto const& model : models) {
    auto const for_time = model.value("refused_for_time", 0.0);
    if (auto const& all = at(model, "refused"); all.is_number()) {
      to.sample(with(labels_of(model), "cause", "time"), for_time);
      to.sample(with(labels_of(model), "cause", "promise"),
                std::max(all.get<double>() - for_time, 0.0));
    }
  }
}

void add_engines(metrics_text& to, json const& engines) {
  if (!engines.is_array()) {
    return;
  }
  auto const of = [](json const& engine) { return labels{{"engine", text_of(engine, "name")}}; };
  to.family("sluice_engine_state", kind::gauge, "1 for the state that the engine is in.");
  for (auto const& engine : engines) {
    for (auto const state : engine_state_names) {
      to.sample(with(of(engine), "state", std::string{state}),
                text_of(engine, "state") == state ? 1 : 0);
    }
  }
  to.family("sluice_engine_requests_total", kind::counter,
            "Requests of the engine that have ended, by how.");
  for (auto const& engine : engines) {
    for (std::string const outcome : {"answered", "refused", "failed", "client_left"}) {
      sample(to, with(of(engine), "outcome", outcome), at(engine, outcome.c_str()));
    }
  }
  auto const each = [&](char const* name, kind what, char const* help, char const* field,
                        double unit) {
    to.family(name, what, help);
    for (auto const& engine : engines) {
      sample(to, of(engine), at(engine, field), unit);
    }
  };
  each("sluice_engine_broken_answers_total", kind::counter,
       "Requests of the engine that have failed when their answer had begun.", "broken_off", 1.0);
  each("sluice_engine_in_flight_requests", kind::gauge, "Requests that the engine has now.",
       "in_flight", 1.0);
  each("sluice_engine_waiting_requests", kind::gauge, "Requests that wait for a place at it.",
       "waiting", 1.0);
  each("sluice_engine_starts_total", kind::counter, "How often its process has been started.",
       "starts", 1.0);
  each("sluice_engine_ends_total", kind::counter,
       "How often its process has ended, or could not be started.", "ends", 1.0);
  each("sluice_engine_last_start_seconds", kind::gauge,
       "What its last start took until it was ready.", "last_start_ms", ms_to_s);
  each("sluice_engine_resident_bytes", kind::gauge, "Memory of the pool that it holds.",
       "resident_bytes", 1.0);
  each("sluice_engine_parked_bytes", kind::gauge,
       "Memory that it needs to come back, whose contents are in host copies.", "parked_bytes",
       1.0);
  each("sluice_engine_kv_bytes", kind::gauge,
       "Memory of the pool that its KV cache holds; nothing where that is not the pool's.",
       "kv_bytes", 1.0);
  each("sluice_engine_kv_used_bytes", kind::gauge, "What requests use of that.", "kv_used_bytes",
       1.0);
  each("sluice_engine_parks_total", kind::counter, "How often it has been parked.", "parks", 1.0);
  each("sluice_engine_last_wake_seconds", kind::gauge,
       "What its last return took, from the request for it until it could be asked.",
       "last_wake_ms", ms_to_s);
  each("sluice_engine_busy_seconds_total", kind::counter,
       "For how long a device has computed for it, since its processes began.", "busy_ms", ms_to_s);
  each("sluice_engine_attainment_observed_ratio", kind::gauge,
       "Share of requests whose answer began in time, within the promise's window.",
       "observed_attainment", 1.0);
  auto const times = [&](char const* name, char const* help, char const* field) {
    to.family(name, kind::histogram, help);
    for (auto const& engine : engines) {
      auto const counts = at(at(engine, field), "counts");
      if (!counts.is_array()) continue;
      to.sample(of(engine), {.bounds = token_distribution::bounds,
                             .counts = counts.get<std::vector<std::uint64_t>>(),
                             .sum = at(at(engine, field), "sum_s").get<double>()});
    }
  };
  times("sluice_engine_time_to_first_token_seconds",
        "From a request's arrival to the first token of its stream.", "ttft");
  times("sluice_engine_inter_token_latency_seconds", "From one token of a stream to the next one.",
        "tbt");
  each("sluice_engine_ttft_attainment_observed_ratio", kind::gauge,
       "Share of streams whose first token came in time, within the promise's window.",
       "observed_ttft_attainment", 1.0);
  each("sluice_engine_tbt_attainment_observed_ratio", kind::gauge,
       "Share of tokens that came in time after the one before, within the promise's window.",
       "observed_tbt_attainment", 1.0);
}

void add_server(metrics_text& to, json const& status) {
  to.family("sluice_server_ready", kind::gauge, "1 if all models can be asked.");
  to.sample({}, at(at(status, "server"), "models_ready") == true ? 1 : 0);
  auto const& executor = at(status, "executor");
  to.family("sluice_executor_starts_total", kind::counter, "Executors that have been started.");
  sample(to, {}, at(executor, "started"));
  to.family("sluice_executor_ends_total", kind::counter,
            "Executors that have ended and were replaced, by what ended them.");
  for (auto const& [cause, count] : at(executor, "ended").items()) {
    sample(to, {{"cause", cause}}, count);
  }
  auto const& pauses = at(status, "pauses");
  auto const one = [&](char const* name, char const* help, char const* field) {
    to.family(name, kind::counter, help);
    sample(to, {}, at(pauses, field));
  };
  one("sluice_training_pauses_total", "Pauses of training's launches, since the executor started.",
      "count");
  one("sluice_training_paused_seconds_total", "Time in which these held training's launches.",
      "held_s");
  one("sluice_training_pauses_cut_short_total",
      "Pauses that ended for training's share of the second.", "cut_short");
  one("sluice_training_withheld_seconds_total",
      "Time in which the device was wanted and training was not held, for that share.",
      "withheld_s");
  one("sluice_inference_busy_seconds_total",
      "Time in which the device worked for inference, since the executor started.", "busy_s");
}

/// What is free counts as absent as far as pages are missing: they are those of free slots, if any.
void add_host_copies(metrics_text& to, json const& copies) {
  if (!copies.is_object()) {
    return;
  }
  to.family("sluice_host_copy_bytes", kind::gauge,
            "Host memory for what jobs park, by its state; together they are all of it.");
  auto const free = copies.value("free_bytes", 0.0);
  auto const absent =
      std::clamp(copies.value("bytes", 0.0) - copies.value("populated_bytes", 0.0), 0.0, free);
  sample(to, {{"state", "free"}}, free - absent);
  sample(to, {{"state", "absent"}}, absent);
  for (std::string const state : {"held", "kept", "damaged"}) {
    sample(to, {{"state", state}}, at(copies, (state + "_bytes").c_str()));
  }
  if (auto const& disk = at(copies, "disk"); disk.is_object()) {
    to.family("sluice_host_copy_disk_bytes", kind::gauge,
              "Disk for what that memory has no room for, by its state; together they are all.");
    for (std::string const state : {"free", "held", "kept", "damaged"}) {
      sample(to, {{"state", state}}, at(disk, (state + "_bytes").c_str()));
    }
  }
}

void add_parking(metrics_text& to, json const& clients) {
  auto const of_jobs = [&](auto const& add) {
    for (auto const& client : clients) {
      if (auto const& parking = at(client, "parking"); parking.is_object()) {
        add(labels{{"job", text_of(client, "name")}, {"slot", at(client, "slot").dump()}}, parking);
      }
    }
  };
  to.family("sluice_parked_bytes", kind::gauge,
            "Memory of a job that is parked: copied, as a copy that there was, or zero.");
  of_jobs([&](labels const& of, json const& parking) {
    for (std::string const state : {"dirty", "clean", "zero"}) {
      auto with_state = of;
      with_state.emplace_back("state", state);
      sample(to, with_state, at(parking, (state + "_bytes").c_str()));
    }
  });
  to.family("sluice_parked_disk_bytes", kind::gauge, "Of the copies, those that lie on a disk.");
  of_jobs(
      [&](labels const& of, json const& parking) { sample(to, of, at(parking, "disk_bytes")); });
  to.family("sluice_parks_total", kind::counter,
            "How often a job has been parked since it joined the pool.");
  of_jobs([&](labels const& of, json const& parking) { sample(to, of, at(parking, "parks")); });
  auto const times = [&](char const* name, metrics_text::kind of_what, char const* help,
                         char const* field, double unit) {
    to.family(name, of_what, help);
    of_jobs(
        [&](labels const& of, json const& parking) { sample(to, of, at(parking, field), unit); });
  };
  times("sluice_parked_seconds_total", kind::counter,
        "How long it has been away in all, going and coming included.", "away_us", us_to_s);
  times("sluice_parking_missed_seconds_total", kind::counter,
        "By how much in all it was back later than its share of a window says.", "missed_us",
        us_to_s);
  times("sluice_parking_window_away_seconds", kind::gauge,
        "Of the last window of its share, how long it was away.", "away_ms", ms_to_s);
  times("sluice_parking_window_resident_seconds", kind::gauge,
        "Of the same window, how long it had its memory.", "resident_ms", ms_to_s);
  times("sluice_parking_waits_seconds", kind::gauge,
        "How long a parked job has waited for its memory.", "waits_ms", ms_to_s);
  times("sluice_parking_owed_in_seconds", kind::gauge,
        "In how long that memory is owed to it; 0: it is.", "owed_in_ms", ms_to_s);
}

void add_pool(metrics_text& to, json const& status) {
  auto const& pool = at(status, "pool");
  to.family("sluice_pool_bytes", kind::gauge,
            "Memory of the pool by its owner; together they are all of it.");
  for (std::string const owner : {"free", "dirty", "training", "serving", "engine"}) {
    sample(to, {{"owner", owner}}, at(pool, (owner + "_bytes").c_str()));
  }
  add_host_copies(to, at(pool, "host_copies"));
  auto const& handovers = at(status, "handovers");
  to.family("sluice_pool_handovers_total", kind::counter,
            "Handovers of memory to serving, since the pool was made.");
  sample(to, {}, at(handovers, "count"));
  to.family("sluice_pool_handed_over_bytes_total", kind::counter,
            "Memory that changed its owner, by who got it, since the pool was made.");
  for (std::string const owner : {"serving", "training", "engines"}) {
    sample(to, {{"to", owner}}, at(handovers, ("bytes_to_" + owner).c_str()));
  }
  to.family("sluice_pool_handover_latency_seconds", kind::gauge,
            "Percentiles of the latest handovers.");
  for (std::string const percentile : {"50", "90", "99"}) {
    sample(to, {{"percentile", percentile}},
           at(at(handovers, "latency_us"), ("p" + percentile).c_str()), us_to_s);
  }
  auto const of_jobs = [&](char const* name, char const* help, char const* field, double unit) {
    to.family(name, kind::counter, help);
    for (auto const& client : at(status, "clients")) {
      if (text_of(client, "kind") == "training") {
        sample(to, {{"job", text_of(client, "name")}, {"slot", at(client, "slot").dump()}},
               at(client, field), unit);
      }
    }
  };
  of_jobs("sluice_training_commits_total",
          "Micro-batches of a job that count, since it joined the pool.", "commits", 1.0);
  of_jobs("sluice_training_discards_total",
          "Micro-batches of a job that lost their memory and ran again, since it joined the pool.",
          "discards", 1.0);
  of_jobs("sluice_training_discarded_seconds_total", "How long these had run by then.",
          "discarded_us", us_to_s);
  add_parking(to, at(status, "clients"));
}

}  // namespace

std::string metrics_of(std::vector<model_statistics> const& models, json const& status,
                       std::optional<json> const& pool) {
  metrics_text made;
  add_tritons(made, models);
  add_durations(made, models);
  add_models(made, at(status, "models"));
  add_engines(made, at(status, "engines"));
  add_server(made, status);
  if (pool) {
    add_pool(made, *pool);
  }
  return made.text();
}

}  // namespace sluice::server
