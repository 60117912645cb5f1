#include "memhandover/broker_queries.hpp"

#include "memhandover/error.hpp"
#include "memhandover/wire.hpp"

namespace sluice::memhandover {
namespace {

/// A conversation with the broker of a folder in which only questions are asked.
class questions {
 public:
  explicit questions(std::string const& runtime_dir) : dir_(prepare_runtime_dir(runtime_dir)) {
    auto socket = connect_to_broker(dir_);
    if (!socket) {
      throw error{error_kind::unavailable,
                  "no broker runs in " + dir_ + "; `sluice run` and `sluice serve` start one"};
    }
    socket_ = std::move(*socket);
  }

  /// The answer to a question has the question's type.
  [[nodiscard]] nlohmann::json ask(nlohmann::json const& question) const {
    constexpr int patience_ms = 5000;
    send_message(socket_.get(), question);
    auto answer = receive_message(socket_.get(), patience_ms);
    if (answer && answer->body["type"] == "error") {
      throw error{error_kind::unsupported, "the broker in " + dir_ +
                                               " is of another version and cannot answer: " +
                                               answer->body.value("message", std::string{})};
    }
    if (!answer || answer->body["type"] != question["type"]) {
      throw error{error_kind::unavailable, "the broker in " + dir_ + " ended while it was asked"};
    }
    answer->body.erase("type");
    return std::move(answer->body);
  }

 private:
  std::string dir_;
  unique_fd socket_;
};

}  // namespace

int broker_pid(std::string const& runtime_dir) {
  auto const socket = connect_to_broker(prepare_runtime_dir(runtime_dir));
  return socket ? peer_pid(socket->get()) : 0;
}

nlohmann::json query_status(std::string const& runtime_dir) {
  return questions{runtime_dir}.ask({{"type", "status"}});
}

nlohmann::json query_chunks(std::string const& runtime_dir) {
  questions const broker{runtime_dir};
  auto result = broker.ask({{"type", "status"}});
  auto runs = nlohmann::json::array();
  for (nlohmann::json from = 0; !from.is_null();) {
    auto const page = broker.ask({{"type", "show"}, {"from", from}});
    runs.insert(runs.end(), page["runs"].begin(), page["runs"].end());
    from = page["next"];
  }
  result["runs"] = std::move(runs);
  return result;
}

}  // namespace sluice::memhandover
