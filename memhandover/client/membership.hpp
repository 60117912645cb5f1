/// A process's place in a pool: its slot, the shared memory, the descriptors, and the conversation
/// with the broker.
///
/// If the broker dies, `reconnect` finds or starts another and offers it the pool; nothing that
/// this process holds changes meanwhile.
///
/// Whoever owns the conversation waits for `news()`, for no longer than `patience()`, and then calls
/// `attend`.
///
/// Thread-safety: `view`, `slot` and `files` are constant after `join`, `copies` is for any thread; all else belongs to
/// the one thread that has the conversation.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "memhandover/base/wire.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/broker/job_wish.hpp"
#include "memhandover/client/host_copy_share.hpp"
#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

class membership {
 public:
  /// Finds the broker or starts it, and joins. Throws what the broker answers (`already_exists` for
  /// a second server, `out_of_memory` for a minimum that the pool cannot promise), or `unavailable`.
  membership(broker_options broker, client_kind kind, std::string const& name,
             std::string const& endpoint, job_wish const& wish = {});
  membership(membership const&) = delete;
  membership& operator=(membership const&) = delete;
  /// Waits for an attempt to reconnect that is under way.
  ~membership();

  [[nodiscard]] ledger_view const& view() const noexcept { return *view_; }
  [[nodiscard]] pool_files const& files() const noexcept { return files_; }
  /// Null where the pool has no host copies that this process could map, and where the present broker has refused those
  /// that it has: what they hold is still there. From any thread.
  [[nodiscard]] host_copy_share* copies() const noexcept {
    return copies_known_.load() ? copies_.get() : nullptr;
  }
  [[nodiscard]] std::uint32_t slot() const noexcept { return slot_; }
  [[nodiscard]] int bell() const noexcept { return bell_.get(); }
  [[nodiscard]] bool has_broker() const noexcept { return static_cast<bool>(socket_); }
  /// Becomes readable when the broker has said something or gone, and while there is none, when an
  /// attempt to find one has ended. −1 between two attempts.
  [[nodiscard]] int news() const noexcept {
    return socket_ ? socket_.get() : attempt_ ? attempt_->done.get() : -1;
  }
  /// How long until `reconnect` begins another attempt; without end while none is due.
  [[nodiscard]] std::optional<std::chrono::milliseconds> patience() const;

  /// The next message; nothing if the broker has gone.
  [[nodiscard]] std::optional<message> receive();
  /// Sends a message; one that cannot be sent is dropped, since a new broker asks again.
  void send(nlohmann::json const& body);
  /// Of a server: it has everything that the ledger's writer needs. This broker and all later ones
  /// hear of it once each; the one that appoints it answers `appointed`.
  void say_ready();
  /// To be called while there is no broker: finds or starts one and takes this place in it, in a thread
  /// of its own, so that whoever calls goes on with its work. True once that has succeeded; an attempt
  /// that has failed is followed by another, a moment later.
  [[nodiscard]] bool reconnect();
  /// One of the two: `receive` if there are news, or `reconnect` while there is no broker. Logs that the
  /// broker has gone, and that another has been found.
  [[nodiscard]] std::optional<message> attend(bool has_news);

  /// Descriptors that a forked child must not keep beyond its own life are all inherited on
  /// purpose, except the socket.
  void abandon_in_child() noexcept {
    socket_.reset();
    (void)attempt_.release();  // its thread does not exist here
    (void)copies_.release();   // its mappings neither: others may be there
    copies_known_.store(false);
  }

 private:
  struct attempt {
    explicit attempt(bool is_ready) : ready(is_ready) {}
    bool const ready;  ///< what the broker is told
    unique_fd done = make_event();
    unique_fd socket;            ///< of the broker that was found; valid when `done` is readable
    std::string copies_refused;  ///< likewise: why; empty if they were not
    std::thread thread;
  };

  void lock_place();
  void map_copies(host_copy_files files, nlohmann::json const& said);
  void hear_of_copies(std::string const& refused);
  void find_broker(attempt& under_way) const;

  broker_options broker_;
  unique_fd socket_;
  unique_fd bell_;
  unique_fd life_read_;
  unique_fd life_write_;  ///< held until the process and its forked descendants have ended
  unique_fd life_lock_;   ///< the same; a description of the mailroom of its own
  pool_files files_;
  std::unique_ptr<host_copy_share> copies_;
  std::atomic<bool> copies_known_{false};
  std::optional<ledger_view> view_;
  std::uint32_t slot_ = 0;
  bool ready_ = false;
  std::unique_ptr<attempt> attempt_;
  std::chrono::steady_clock::time_point next_attempt_{};  ///< later only after one that failed
};

}  // namespace sluice::memhandover
