/// An inference_service without threads, whose answers come at once or when asked for, for what is fuzzed in front of it.
///
/// Models: "all" has an input of each of several types and answers with them; "none" is in the repository and cannot be served;
/// "raises" answers with an error. Others there are not.
#pragma once

#include <deque>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server::fuzzing {

class echo_service : public inference_service {
 public:
  static model_metadata all() {
    std::vector<tensor_spec> const tensors{{"f", datatype::fp32, {-1, -1}},
                                           {"i", datatype::int64, {-1}},
                                           {"s", datatype::bytes, {-1}},
                                           {"h", datatype::fp16, {2}},
                                           {"o", datatype::boolean, {-1}}};
    return {"all", {"1", "3"}, "echoing", tensors, tensors};
  }

  /// Answers wait for `answer_waiting`.
  void set_late(bool late) { late_ = late; }
  /// Whether there was one.
  bool answer_waiting() {
    bool const has_one = !waiting_.empty();
    while (!waiting_.empty()) {
      auto const answer = std::move(waiting_.front().second);
      waiting_.pop_front();
      answer();
    }
    return has_one;
  }

  [[nodiscard]] readiness ready() const override { return {}; }
  [[nodiscard]] std::vector<unservable_model> unservable() const override {
    return {{"none", error{error_kind::unavailable, "it has no file"}, true}};
  }
  [[nodiscard]] std::vector<std::string> models() const override { return {"all", "raises"}; }
  [[nodiscard]] model_metadata metadata(std::string const& model,
                                        std::string const& version) const override {
    if (model == "none") throw error{error_kind::unavailable, "it has no file"};
    if (model != "all" && model != "raises") {
      throw error{error_kind::not_found, "there is no model '" + model + "'"};
    }
    if (!version.empty() && version != "1" && version != "3") {
      throw error{error_kind::not_found, "there is no version '" + version + "'"};
    }
    auto known = all();
    known.name = model;
    return known;
  }
  [[nodiscard]] readiness model_ready(std::string const& model,
                                      std::string const& version) const override {
    return {metadata(model, version).name == "all", "cold"};
  }
  [[nodiscard]] nlohmann::json config(std::string const& model,
                                      std::string const& version) const override {
    return {{"name", metadata(model, version).name}};
  }
  void load(std::string const& model, nlohmann::json const& /*parameters*/) override {
    static_cast<void>(metadata(model, ""));
  }
  void unload(std::string const& model) override { static_cast<void>(metadata(model, "")); }
  request_ticket infer(infer_request request, std::function<void(infer_result)> done) override {
    auto const ticket = ++tickets_;
    auto answer = [request = std::move(request), done = std::move(done)]() mutable {
      if (request.model == "raises") return done(error{error_kind::out_of_memory, "too large"});
      infer_response response{request.model, "1", request.id, {}};
      for (auto const& input : request.inputs) {
        auto const& wanted = request.outputs;
        if (wanted.empty() || std::find(wanted.begin(), wanted.end(), input.name) != wanted.end()) {
          response.outputs.push_back(input);
        }
      }
      done(std::move(response));
    };
    if (late_) {
      waiting_.emplace_back(ticket, std::move(answer));
    } else {
      answer();
    }
    return ticket;
  }
  void cancel(request_ticket which) override {
    std::erase_if(waiting_, [&](auto const& each) { return each.first == which; });
  }
  [[nodiscard]] nlohmann::json status() const override { return {{"state", "echoing"}}; }
  [[nodiscard]] nlohmann::json statistics(std::string const& model,
                                          std::string const& version) const override {
    if (!model.empty()) static_cast<void>(metadata(model, version));
    return {{"model_stats", nlohmann::json::array()}};
  }
  [[nodiscard]] std::string metrics() const override { return "echoing 1\n"; }

 private:
  std::deque<std::pair<request_ticket, std::function<void()>>> waiting_;
  request_ticket tickets_ = 0;
  bool late_ = false;
};

}  // namespace sluice::server::fuzzing
