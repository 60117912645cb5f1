/// A tenant's side of the pool, a training job's or an engine's: asks for chunks, gives them up, and answers demands.
///
/// One control thread of this object waits for the bell. It never waits for Python and calls
/// nothing that the gate holds; what it does with a demand is the handler's business. What throws there
/// is logged: a demand is answered all the same, with nothing.
///
///   auto pool = tenant_client::join(broker, client_kind::training, "job",
///                                   [&](demand const& d) { return give_up(d); });
///   pool->ask(16, lifetime::revocable, deadline);   // any thread but the handler's
///   auto chunks = pool->collect();                  // maybe fewer than asked for
///   pool->release(chunks);
///
/// Thread-safety: all functions from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/broker/job_wish.hpp"
#include "memhandover/client/host_copy_share.hpp"
#include "memhandover/ledger/client_mailbox.hpp"
#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

/// The server wants so many chunks, or an operator all that there are.
struct demand {
  std::uint32_t number = 0;
  std::uint32_t chunks = 0;
  std::int64_t awake_ns = 0;  ///< when the control thread saw it
  /// Whether the server still waits for the answer. From any thread, as long as the handler runs.
  std::function<bool()> stands;
  /// Gives chunks up before the rest of the answer. By the handler's thread, as long as it runs.
  std::function<void(std::span<std::uint32_t const> chunks)> give{};
  bool from_operator = false;  ///< who has just come back goes again, too
  bool may_park = true;        ///< else what would have to be parked for it stays
};

/// What was given up, and when the steps to it were done (CLOCK_MONOTONIC nanoseconds).
/// `unit_ended_ns`: when what the device was executing as the gate closed had ended; 0 if that is not
/// known. What comes after it is this software's doing.
/// `afterwards` runs with the chunks when the server already has them: what need not hold it up, such
/// as removing mappings and reopening the gate.
struct demand_answer {
  std::vector<std::uint32_t> chunks;
  std::uint32_t live_chunks = 0;  ///< of these, from a micro-batch that was running
  std::int64_t noticed_ns = 0;    ///< when the first thread acted on the demand
  std::int64_t closed_ns = 0;
  std::int64_t unit_ended_ns = 0;
  std::int64_t idle_ns = 0;
  std::function<void(std::span<std::uint32_t const> chunks)> afterwards;
};

class tenant_client {
 public:
  using handler = std::function<demand_answer(demand const&)>;

  /// Finds the broker or starts it, and joins. Throws as `membership` does; `invalid_argument` for a kind that
  /// is no tenant. `wish` is a training job's alone.
  [[nodiscard]] static std::unique_ptr<tenant_client> join(broker_options const& broker,
                                                           client_kind kind,
                                                           std::string const& name,
                                                           handler on_demand,
                                                           job_wish const& wish = {});
  virtual ~tenant_client() = default;

  [[nodiscard]] virtual ledger_view const& view() const noexcept = 0;
  [[nodiscard]] virtual pool_files const& files() const noexcept = 0;
  /// Null where the pool has no host copies.
  [[nodiscard]] virtual host_copy_share* copies() const noexcept = 0;
  [[nodiscard]] virtual std::uint32_t slot() const noexcept = 0;
  [[nodiscard]] virtual mailbox_header& mailbox() const noexcept = 0;

  /// Asks for `count` chunks and waits until the writer has granted what it can at once; `collect`
  /// has them then. Nothing is granted if no writer has answered by the deadline. `coming_back` is for the control
  /// thread; it asks nothing while another thread asks.
  virtual void ask(std::uint32_t count, lifetime kind,
                   std::chrono::steady_clock::time_point deadline,
                   precedence turn = precedence::after_demands) = 0;
  /// What has been granted to those who asked, maybe in other threads, since the last call. So a
  /// demand can have at once what a thread has not come back for. Chunks whose contents were
  /// another's are appended to `needs_scrub` if that is given.
  [[nodiscard]] virtual std::vector<std::uint32_t> collect(
      std::vector<std::uint32_t>* needs_scrub = nullptr) = 0;
  /// Gives chunks back that nothing here reaches any more.
  virtual void release(std::span<std::uint32_t const> chunks) = 0;
  /// Waits, at most until the deadline, until the writer has taken what was released before: the pool's counts have it then.
  virtual void await_releases(std::chrono::steady_clock::time_point deadline) = 0;

  /// Waits until the pool would grant at least `count` chunks, at most until the deadline. Shown as
  /// "waiting".
  virtual bool wait_grantable(std::uint32_t count,
                              std::chrono::steady_clock::time_point deadline) = 0;

  /// The same without waiting: from now on (true) the control thread is woken when the pool would grant more, also to
  /// those who are parked.
  virtual void show_waiting(bool waits) = 0;

  /// From now on has the control thread call `look` every so often, so that what the ledger's header
  /// says is noticed although nobody rings. To be called once.
  virtual void watch(std::function<void()> look, std::chrono::milliseconds every) = 0;

  /// From now on has the control thread call `work` beside demands: at once, whenever it is rung or `nudge`d, and after what
  /// it returns, until that is nothing. It is destroyed with this object, before the mappings of host
  /// copies. To be called once.
  virtual void meanwhile(std::function<std::optional<std::chrono::milliseconds>()> work) = 0;

  /// Has it called soon. Calls nothing but the kernel.
  virtual void nudge() const noexcept = 0;

  /// From now on the control thread does not sleep while a server is attached: it takes a processor, and
  /// sees a demand without being woken.
  virtual void stay_awake() = 0;

  /// Demands are met by the end of this process from now on. Returns when the control thread has ended what it was at: of what it called
  /// since only `work` goes on. For a process that is about to end, whose driver nobody may be in when it goes.
  virtual void leave() = 0;

  /// After a fork, in the child: forgets thread and broker; the object may then only be leaked.
  virtual void abandon_in_child() noexcept = 0;
};

}  // namespace sluice::memhandover
