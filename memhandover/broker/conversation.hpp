/// The manners of a conversation: fields are checked, refusals are answers, and an answer that is a
/// refusal becomes the error that it tells.
#pragma once

#include <string>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/base/processes.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/ledger/host_copy_table.hpp"

namespace sluice::memhandover {

/// How long an answer may take: a broker may first have to create the chunks of a whole GPU.
inline constexpr int answer_timeout_ms = 70'000;

/// One field of a message. `missing` counts where there is none; throws `invalid_argument` for one
/// of another type.
template <typename T>
[[nodiscard]] T field(nlohmann::json const& body, char const* name, T missing) {
  auto const found = body.find(name);
  if (found == body.end()) {
    return missing;
  }
  try {
    return found->get<T>();
  } catch (nlohmann::json::exception const&) {
    throw error{error_kind::invalid_argument,
                std::string{"the field "} + name + " of a message has the wrong type"};
  }
}

/// A message that names a pool: the backend, device and sizes of the options, where they say any.
[[nodiscard]] nlohmann::json wish_message(std::string const& type, broker_options const& options);

/// Adds who this process is to a message.
void add_identity(nlohmann::json& body, process_identity const& who);
/// Who a message says that it is from; pid 0 if it does not.
[[nodiscard]] process_identity identity_in(nlohmann::json const& body);

/// The answer that tells an error.
[[nodiscard]] nlohmann::json refusal(error const& why);

/// The other side has gone before it answered, `unavailable`.
class unanswered : public error {
 public:
  explicit unanswered(std::string const& message) : error{error_kind::unavailable, message} {}
};

/// The next message, which is of that type. Throws what a refusal tells, `unanswered` if the other
/// side has gone, `unavailable` if it is silent.
[[nodiscard]] message expect(int socket, std::string const& type);

/// Sends a question, and waits for its answer, which is of that type. Throws as `expect`, also what the other
/// side has said before it would not hear the question.
[[nodiscard]] message ask(int socket, nlohmann::json const& question, std::string const& type,
                          std::vector<int> const& descriptors = {});

/// A conversation with the broker of a runtime folder that has begun.
struct begun_conversation {
  unique_fd connection;
  message answer;
};

/// The same over a new connection. A broker that was about to end when it was reached has not heard the question: then
/// the next one is asked. Throws as `ensure_broker` and `ask`.
[[nodiscard]] begun_conversation ask_broker(broker_options const& options,
                                            nlohmann::json const& question, std::string const& type,
                                            std::vector<int> const& descriptors = {});

/// Descriptors that a `rejoin` brings, but for a pidfd: of the pool and its client, and of host copies if it has some.
[[nodiscard]] std::size_t rejoin_descriptors(nlohmann::json const& rejoin);

/// Those of host copies in a message, from `first` on.
[[nodiscard]] host_copy_files copy_files_in(std::vector<unique_fd>& descriptors, std::size_t first,
                                            bool with_disk);

}  // namespace sluice::memhandover
