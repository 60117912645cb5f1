/// The examples in the headers of runtime/server/executor/ and of what it shares with hosts, word for word: compiled, never
/// run.
#include <memory>
#include <new>
#include <utility>

#include "memhandover/base/wire.hpp"
#include "runtime/server/executor/child_process.hpp"
#include "runtime/server/executor/detail/fields.hpp"
#include "runtime/server/executor/detail/reader_role.hpp"
#include "runtime/server/executor/detail/received_file.hpp"
#include "runtime/server/executor/detail/spare_process.hpp"
#include "runtime/server/executor/end_report.hpp"
#include "runtime/server/executor/executor_session.hpp"
#include "runtime/server/executor/parcel.hpp"
#include "runtime/server/executor/remote_executor.hpp"
#include "runtime/server/executor/shared_board.hpp"
#include "runtime/server/hosting/model_host.hpp"
#include "runtime/server/inference/background_thread.hpp"
#include "runtime/server/inference/host_board.hpp"

namespace sluice::server::header_examples {

using namespace std::chrono_literals;
using memhandover::send_message;
using memhandover::unique_fd;

void of_host_board(void* shared, std::size_t model, request_ticket ticket) {
  host_board* const board = new (shared) host_board;
  board->begin({activity::computing, model, ticket});
  board->end();
}

void of_shared_board(int socket, nlohmann::json const& body, unique_fd descriptor) {
  auto const made = make_shared_board();
  send_message(socket, body, {made.file.get()});
  auto const seen = open_shared_board(std::move(descriptor));
}

void of_end_report(std::shared_ptr<host_board> const& board) {
  report_end_on(board);
}

void read_a_large_body() {}

void of_background_thread() {
  background_thread bodies;
  bodies.post([] { read_a_large_body(); });
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-variable"
void of_fields() {
  using detail::field_reader;
  using detail::put_number;
  using detail::put_text;
  std::vector<std::byte> bytes;
  put_number<std::int64_t>(bytes, 7);
  put_text(bytes, "sum");
  field_reader from{bytes};
  auto const seven = from.number<std::int64_t>();
  auto const sum = from.text();
}
#pragma GCC diagnostic pop

struct of_reader_role {
  using reader_role = detail::reader_role;

  reader_role role;

  void close() { role.close(); }

  void run(reader_role::member me) {
    while (role.await_turn(me)) {
      if (role.has_deputy(me)) {
        role.begin(me);
        role.end(me);
      }
    }
  }
};

void of_parcel(int socket, infer_request const& request) {
  auto const parcel = wrap(request);
  if (!parcel.try_send(socket)) {
  }
  auto const seen = unwrap_request(*memhandover::receive_any(socket).received);
}

void of_child_process(unique_fd socket) {
  auto child = child_process::start({"/opt/worker", "--socket", "3"}, std::move(socket));
  child.kill();
  auto const end = child.wait();
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-variable"
void of_executor_session(
    int socket, model_host& host,
    std::function<nlohmann::json(model_host&, executor_orders const&)> const& change) {
  executor_session session{unique_fd{socket}};
  try {
    if (auto const wanted = session.preparation()) {
      session.prepared();
    }
    auto const& orders = session.orders();
    (void)session.serve(host, {{"device", 0}}, {},
                        [&](executor_orders const& now) { return change(host, now); });
    (void)host.stop(0ms);
  } catch (error const& failure) {
    session.fail(failure);
  }
}
#pragma GCC diagnostic pop

void of_received_file(int descriptor, std::size_t size) {
  using detail::received_file;
  auto const file = std::make_shared<received_file>(descriptor, size);
  tensor_bytes second{file, 64, 8};
}

void of_spare_process(detail::spare_process& spare, detail::spare_process::clock::time_point now) {
  spare.want({{"device", 0}});
  if (spare.is_due(now)) {
    spare.start(now);
  }
  spare.hear(now);
  if (auto process = spare.take()) {
  }
}

void of_remote_executor(remote_executor::options const& options, infer_request request,
                        std::function<bool()> const& given_up,
                        model_executor::completion const& reply) {
  remote_executor executor{options};
  if (!executor.wait_until_ready(given_up)) return;
  executor.submit(0, std::move(request), [&](infer_result got) { reply(std::move(got)); });
  if (!executor.stop(1s)) {
  }
}

}  // namespace sluice::server::header_examples
