/// An inference_service that adds, for tests of what lies in front of it: it runs requests on
/// threads of its own, can be told to hold them, and has models that misbehave in each way that a
/// service could.
///
/// Models: "add" (a + b, FP32 [-1]), "cold" (the same, never ready), "a/b é" (the same, warm), and
/// with one input `kind` INT32 [1]: "fails" (answers with that error_kind), "throws" (out of
/// infer), "drops" (never answers), "twice" (answers twice), "inline" (answers before infer
/// returns).
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

class adding_service : public inference_service {
 public:
  adding_service() {
    for (int i = 0; i < 2; ++i) workers_.emplace_back([this] { work(); });
  }
  ~adding_service() override {
    {
      std::lock_guard const lock{mutex_};
      stopping_ = true;
      held_ = false;
    }
    changed_.notify_all();
    for (auto& worker : workers_) worker.join();
  }
  adding_service(adding_service const&) = delete;
  adding_service& operator=(adding_service const&) = delete;
  adding_service(adding_service&&) = delete;
  adding_service& operator=(adding_service&&) = delete;

  /// Requests that come from now on wait until `release`.
  void hold() {
    std::lock_guard const lock{mutex_};
    held_ = true;
  }
  void release() {
    {
      std::lock_guard const lock{mutex_};
      held_ = false;
    }
    changed_.notify_all();
  }
  /// Blocks until `count` requests have come in all.
  void await_requests(std::size_t count) {
    std::unique_lock lock{mutex_};
    if (!changed_.wait_for(lock, std::chrono::seconds{60}, [&] { return received_ >= count; })) {
      throw std::runtime_error{"the service got no request"};
    }
  }
  /// Blocks until `count` requests have been answered in all.
  void await_answers(std::size_t count) {
    std::unique_lock lock{mutex_};
    if (!changed_.wait_for(lock, std::chrono::seconds{60}, [&] { return answered_ >= count; })) {
      throw std::runtime_error{"the service answered no request"};
    }
  }
  /// Whoever asks for that model waits; "": nobody does.
  void hold_lookups_of(std::string model) {
    std::lock_guard const lock{mutex_};
    slow_to_find_ = std::move(model);
    changed_.notify_all();
  }
  /// Blocks until somebody waits there.
  void await_held_lookup() {
    std::unique_lock lock{mutex_};
    if (!changed_.wait_for(lock, std::chrono::seconds{60}, [&] { return held_lookups_ > 0; })) {
      throw std::runtime_error{"nobody asks for the model"};
    }
  }
  void set_ready(readiness ready) {
    std::lock_guard const lock{mutex_};
    ready_ = std::move(ready);
  }
  /// Of "cold", in the place of that word.
  void set_cold(readiness why) {
    std::lock_guard const lock{mutex_};
    cold_ = std::move(why);
  }

  [[nodiscard]] readiness ready() const override {
    std::lock_guard const lock{mutex_};
    return ready_;
  }
  void set_unservable(std::vector<unservable_model> models) { unservable_ = std::move(models); }
  [[nodiscard]] std::vector<unservable_model> unservable() const override { return unservable_; }
  [[nodiscard]] std::vector<std::string> models() const override { return {"add", "cold"}; }

  [[nodiscard]] model_metadata metadata(std::string const& model,
                                        std::string const& version) const override {
    {
      std::unique_lock lock{mutex_};
      if (model == slow_to_find_) ++held_lookups_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return model != slow_to_find_; });
    }
    if (!version.empty() && version != "1") {
      throw error{error_kind::not_found,
                  "model '" + model + "' has no version '" + version + "'; it has 1"};
    }
    if (model == "add" || model == "cold" || model == "a/b \xC3\xA9") {
      return {model,
              {"1"},
              "adding",
              {{"a", datatype::fp32, {-1}}, {"b", datatype::fp32, {-1}}},
              {{"sum", datatype::fp32, {-1}}}};
    }
    for (auto const* const known : {"fails", "throws", "drops", "twice", "inline"}) {
      if (model == known) {
        return {model,
                {"1"},
                "adding",
                {{"kind", datatype::int32, {1}}},
                {{"y", datatype::int32, {1}}}};
      }
    }
    throw error{error_kind::not_found, "there is no model '" + model + "'"};
  }
  [[nodiscard]] readiness model_ready(std::string const& model,
                                      std::string const& version) const override {
    bool const is_cold = metadata(model, version).name == "cold";
    std::lock_guard const lock{mutex_};
    return is_cold ? cold_ : readiness{};
  }

  request_ticket infer(infer_request request, std::function<void(infer_result)> done) override {
    if (request.model == "throws") throw error{error_kind::unavailable, "thrown by infer"};
    if (request.model == "inline") {
      done(infer_response{"inline", "1", request.id, {}});
      return 0;
    }
    std::lock_guard const lock{mutex_};
    waiting_.emplace_back(std::move(request), std::move(done));
    changed_.notify_all();
    return ++received_;
  }
  void cancel(request_ticket which) override {
    std::lock_guard const lock{mutex_};
    cancelled_.push_back(which);
    changed_.notify_all();
  }
  /// Blocks until `count` requests have been cancelled in all; which these are, counted from 1.
  std::vector<request_ticket> await_cancelled(std::size_t count) {
    std::unique_lock lock{mutex_};
    if (!changed_.wait_for(lock, std::chrono::seconds{60},
                           [&] { return cancelled_.size() >= count; })) {
      throw std::runtime_error{"no request was cancelled"};
    }
    return cancelled_;
  }
  void set_config(nlohmann::json config) { config_ = std::move(config); }
  [[nodiscard]] nlohmann::json config(std::string const& model,
                                      std::string const& version) const override {
    auto const known = metadata(model, version);
    return config_.is_null() ? nlohmann::json{{"name", known.name}} : config_;
  }
  [[nodiscard]] nlohmann::json status() const override { return {{"state", "adding"}}; }
  [[nodiscard]] nlohmann::json statistics(std::string const& model,
                                          std::string const& version) const override {
    if (!model.empty()) static_cast<void>(metadata(model, version));
    return {{"of", model}, {"version", version}};
  }
  [[nodiscard]] std::string metrics() const override { return "adding 1\n"; }

 private:
  void work() {
    std::unique_lock lock{mutex_};
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || (!held_ && !waiting_.empty()); });
      if (waiting_.empty()) return;
      auto [request, done] = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      answer(request, done);
      done = nullptr;
      lock.lock();
      ++answered_;
      changed_.notify_all();
    }
  }

  static void answer(infer_request const& request, std::function<void(infer_result)> const& done) {
    if (request.model == "drops") return;
    if (request.model == "fails") {
      std::int32_t kind = 0;
      std::memcpy(&kind, request.inputs.at(0).data.data(), sizeof(kind));
      done(error{static_cast<error_kind>(kind), "secret of the service"});
      return;
    }
    infer_response response{request.model, "1", request.id, {}};
    if (request.model == "twice") done(response);
    if (request.inputs.size() == 2) response.outputs.push_back(sum_of(request));
    done(std::move(response));
  }

  static tensor sum_of(infer_request const& request) {
    auto const bytes = request.inputs[0].data.size();
    tensor result{"sum", datatype::fp32, request.inputs[0].shape, tensor_bytes::unwritten(bytes)};
    for (std::size_t at = 0; at + sizeof(float) <= bytes; at += sizeof(float)) {
      float a = 0;
      float b = 0;
      std::memcpy(&a, request.inputs[0].data.data() + at, sizeof(float));
      std::memcpy(&b, request.inputs[1].data.data() + at, sizeof(float));
      a += b;
      std::memcpy(result.data.data() + at, &a, sizeof(float));
    }
    return result;
  }

  nlohmann::json config_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // All under mutex_:
  std::deque<std::pair<infer_request, std::function<void(infer_result)>>> waiting_;
  std::vector<request_ticket> cancelled_;
  std::size_t received_ = 0;
  std::size_t answered_ = 0;
  std::string slow_to_find_;
  mutable std::size_t held_lookups_ = 0;
  bool held_ = false;
  std::vector<unservable_model> unservable_;
  readiness ready_;
  readiness cold_{false, "cold"};
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace sluice::server
