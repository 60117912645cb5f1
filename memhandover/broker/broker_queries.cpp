#include "memhandover/broker/broker_queries.hpp"

#include <poll.h>

#include <chrono>
#include <thread>

#include "memhandover/base/error.hpp"
#include "memhandover/base/processes.hpp"
#include "memhandover/base/waiting.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/broker/runtime_folder.hpp"

namespace sluice::memhandover {
namespace {

/// A conversation with the broker of a folder in which only questions are asked.
class questions {
 public:
  explicit questions(std::string const& runtime_dir) : dir_(check_runtime_dir(runtime_dir)) {
    constexpr std::chrono::milliseconds until_it_listens{1'000}, apart{5};
    auto socket = connect_to_broker(dir_);
    auto other = socket ? std::nullopt : holder_of_broker_lock(dir_);
    // One that begins, or ends, has its lock a little longer than its socket.
    auto const until = std::chrono::steady_clock::now() + until_it_listens;
    while (other && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(apart);
      if ((socket = connect_to_broker(dir_))) {
        break;
      }
      other = holder_of_broker_lock(dir_);
    }
    if (!socket) {
      throw error{error_kind::unavailable, other
                                               ? unreachable_broker(dir_, *other)
                                               : "no broker runs in " + dir_ +
                                                     "; `sluice run` and `sluice serve` start one"};
    }
    socket_ = std::move(*socket);
  }

  /// The answer to a question has the question's type.
  [[nodiscard]] nlohmann::json ask(nlohmann::json const& question) const {
    try {
      send_message(socket_.get(), question);
    } catch (error const&) {
      if (!is_ready(socket_.get(), POLLIN)) {
        throw;
      }
      // It has said why it does not hear it.
    }
    await_answer();
    auto answer = receive_message(socket_.get());
    if (answer && answer->body["type"] == "error") {
      auto const text = answer->body.value("message", std::string{});
      auto const kind = static_cast<error_kind>(answer->body.value("kind", 0));
      // Of what it does not know at all it says that the message is wrong.
      if (kind != error_kind::invalid_argument && kind != error_kind::internal) {
        throw error{kind, text};
      }
      throw error{error_kind::unsupported,
                  "the broker in " + dir_ + " is of another version and cannot answer: " + text};
    }
    if (!answer || answer->body["type"] != question["type"]) {
      throw error{error_kind::unavailable, "the broker in " + dir_ + " ended while it was asked"};
    }
    answer->body.erase("type");
    return std::move(answer->body);
  }

 private:
  /// It may wait for a slow disk, or for processors that others have; not if it is stopped.
  void await_answer() const {
    constexpr std::chrono::seconds until_a_look{5}, patience{30};
    auto const asked_at = std::chrono::steady_clock::now();
    if (await_ready(socket_.get(), POLLIN, asked_at + until_a_look)) {
      return;
    }
    auto const pid = peer_pid(socket_.get());
    if (pid != 0 && is_stopped(identity_of(pid))) {
      auto const named = std::to_string(pid);
      throw error{
          error_kind::unavailable,
          "the broker of " + dir_ + " (pid " + named +
              ") does not answer: it is stopped (SIGSTOP, or a debugger), and `kill -CONT " +
              named + "` lets it go on"};
    }
    if (!await_ready(socket_.get(), POLLIN, asked_at + patience)) {
      throw error{error_kind::unavailable,
                  "the broker of " + dir_ + " (pid " + std::to_string(pid) +
                      ") has not answered within " + std::to_string(patience.count()) +
                      " s: its disk or the processors are very busy; ask again later"};
    }
  }

  std::string dir_;
  unique_fd socket_;
};

/// Asks `describe` of each pool; one that is given back meanwhile is left out.
template <typename Describe>
nlohmann::json each_pool(std::string const& runtime_dir, std::optional<int> device,
                         Describe&& describe) {
  auto found = nlohmann::json::array();
  std::string there;
  // Stays open to the end: a broker that nobody talks to may end between two conversations.
  questions const kept{runtime_dir};
  auto const pools = kept.ask({{"type", "pools"}})["pools"];
  for (auto const& pool : pools) {
    there += (there.empty() ? "" : ", ") + pool["device"].dump();
    if (device && pool["device"] != *device) {
      continue;
    }
    try {
      // A conversation each: a refusal ends one.
      found.push_back(describe(questions{runtime_dir}, pool["pool_id"]));
    } catch (error const& why) {
      if (why.kind() != error_kind::not_found) {
        throw;
      }
    }
  }
  if (found.empty()) {
    throw error{error_kind::not_found, there.empty()
                                           ? "the broker keeps no pool at present"
                                           : "the broker keeps no pool of device " +
                                                 (device ? std::to_string(*device) : "any") +
                                                 "; it has pools of the devices " + there};
  }
  auto result = found.front();
  if (found.size() > 1) {
    result["pools"] = std::move(found);
  }
  return result;
}

}  // namespace

int broker_pid(std::string const& runtime_dir) {
  auto const socket = connect_to_broker(check_runtime_dir(runtime_dir));
  return socket ? peer_pid(socket->get()) : 0;
}

nlohmann::json query_status(std::string const& runtime_dir, std::optional<int> device) {
  return each_pool(runtime_dir, device, [](questions const& asked, nlohmann::json const& id) {
    return asked.ask({{"type", "status"}, {"pool_id", id}});
  });
}

nlohmann::json query_chunks(std::string const& runtime_dir, std::optional<int> device) {
  return each_pool(runtime_dir, device, [](questions const& asked, nlohmann::json const& id) {
    auto pool = asked.ask({{"type", "status"}, {"pool_id", id}});
    auto runs = nlohmann::json::array();
    for (nlohmann::json from = 0; !from.is_null();) {
      auto const page = asked.ask({{"type", "show"}, {"pool_id", id}, {"from", from}});
      runs.insert(runs.end(), page["runs"].begin(), page["runs"].end());
      from = page["next"];
    }
    pool["runs"] = std::move(runs);
    return pool;
  });
}

void give_order(std::string const& runtime_dir, nlohmann::json const& order) {
  (void)questions{runtime_dir}.ask(order);
}

nlohmann::json query_address(std::string const& runtime_dir, std::uint64_t address,
                             std::optional<int> device, std::uint32_t pid) {
  return each_pool(runtime_dir, device, [=](questions const& asked, nlohmann::json const& id) {
    return asked.ask({{"type", "address"}, {"pool_id", id}, {"address", address}, {"pid", pid}});
  });
}

}  // namespace sluice::memhandover
