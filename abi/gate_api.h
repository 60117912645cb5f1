/* The C boundary between the gate (preloaded, SONAME libcuda.so.1) and the runtime library
 * (libsluice_runtime.so).
 *
 * The gate is inert until the process really uses CUDA: at the first call that needs memory or
 * launches work, with a context current, it opens the library named by SLUICE_RUNTIME_LIBRARY and
 * calls sluice_runtime_attach() once. Each side then calls the other through a table. Tables only
 * grow at their end; `size` says how much a side knows. All functions may be called from any thread
 * unless they say otherwise; none throws.
 */
/* C has its own names and headers. */
/* NOLINTBEGIN(modernize-*,readability-identifier-naming) */
#ifndef SLUICE_ABI_GATE_API_H
#define SLUICE_ABI_GATE_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How often calls of one function have waited for what was left to the gate's thread, and how long. */
struct sluice_gate_flushes {
  char const* symbol;
  uint64_t times;
  int64_t waited_ns;
};

/* Work that takes the device longer than the bound of run-ahead: a kernel by its name, what else by
 * its entry point; as last predicted, and how often it was launched as such. */
struct sluice_gate_long_unit {
  char name[120];
  int64_t nanoseconds;
  uint64_t times;
};

/* A call of a library, of NCCL say, that puts work on the device which ends only when other processes
 * have put theirs there. So it is made only when all have agreed to (nccl_shim/agreement/cut.hpp), and what has
 * been agreed to must be made. All functions are called by one thread, which is inside the gate. */
struct sluice_agreed_call {
  void* stream; /* that it works on */
  void* of;
  /* Everything before it is with the driver: asks the others. Also after each `withdraw`. */
  void (*ask)(void* of);
  /* 1 when they have agreed, or never will; 2 when they have dropped the micro-batch that it belongs
   * to; asked again and again, it must not wait long. */
  int (*is_agreed)(void* of);
  /* The gate is closing: takes the question back. 1 if they have agreed in between. */
  int (*withdraw)(void* of);
  /* Makes it. What it calls of the driver belongs to it and passes. The last call of all. */
  void (*make)(void* of);
  /* Instead of `make`: it belonged to a micro-batch that has been dropped. NULL: such a thread's call is
   * refused. */
  void (*drop)(void* of);
};

/* A launch of a graph that holds what needs agreement. */
struct sluice_graph_launch {
  void* stream;
  void* of;
  /* Launches it, when all have agreed: the driver's result, 0 for success. */
  int (*make)(void* of);
  /* The last call of all, whether it has been launched or not. */
  void (*end)(void* of);
};

/* What becomes of such a launch. */
enum sluice_graph_result {
  SLUICE_GRAPH_REFUSED = -1,
  SLUICE_GRAPH_PASSES = 0, /* like a graph that holds none */
  SLUICE_GRAPH_AGREED = 1
};

/* What becomes of a call that needs agreement. */
enum sluice_agreed_result {
  SLUICE_AGREED_REFUSED = -1,
  SLUICE_AGREED_LEFT = 0, /* to the gate's thread */
  SLUICE_AGREED_MADE = 1,
  SLUICE_AGREED_DROPPED = 2
};

/* Offered by whoever asks the other processes of a job, for micro-batches in which they work together:
 * all of them keep such a one, or all run it again. Other functions of it may be called from any thread. */
struct sluice_agreement {
  size_t size;
  /* Whether the gate may be closed for a while (1). As long as that is so for none of the processes, what
   * needs agreement is made without asking. */
  void (*may_pause)(int may);
  /* After that: waits until this process has made what others had made before they asked. Until then another
   * one's device may wait for it, also while its gate is closed. 1, or 0 if the deadline passes. One thread
   * at a time. */
  int (*resolve)(int64_t deadline_ns);
  /* Expendable threads may call what needs agreement (1), or not (0). */
  void (*allow_inside)(int allow);
  /* Micro-batches end with that communicator of NCCL, whose ranks are all that work together; else with the
   * first that one uses. 1, or 0 if its ranks do not agree. */
  int (*end_with)(void* communicator);
  /* Asks the others to keep the calling thread's micro-batch. When they have agreed it calls `keep`, from
   * inside the gate. 1 if it has; 0 if the micro-batch has been dropped. */
  int (*keep)(void (*keep)(void* of), void* of);
  /* This process runs its micro-batch again, so that the others must, too. */
  void (*run_again)(void);
  /* Of what `attach_to_capture` was given: something for a graph that holds `one` and then `other`. */
  void* (*join)(void* one, void* other);
  void (*release)(void* held);
  /* A graph that holds it is to be launched. AGREED: `call` is to be made instead; it makes the launch and
   * ends it, or ends it alone. Else whoever asks ends it. */
  enum sluice_graph_result (*agree_on_launch)(void* held, struct sluice_graph_launch const* launch,
                                              struct sluice_agreed_call* call);
  /* Whether devices of other processes may wait for this one while its gate is closed (1): it has a communicator whose ranks do not
   * agree on what they call. */
  int (*others_may_wait)(void);
};

/* Is told when a process that computes for others, not one that trains, begins to use the device, and when it no longer
 * does, so that the device can be claimed for just so long. Both are called from inside calls of the driver, one at a
 * time, and return soon: what they lock is held by nobody who calls the driver. */
struct sluice_launch_watcher {
  size_t size;
  void* of;
  /* Something is about to be put on a device that has done all before. By the thread that does, outside of the gate;
   * others that come wait for it. */
  void (*begins)(void* of);
  /* The device has done all that it was given. By a thread that has waited for that (1), or that alone has found out
   * (0): then whoever launches may only have been too slow. */
  void (*drained)(void* of, int waited);
};

struct sluice_runtime_api;

/* What the gate offers to the runtime. */
struct sluice_gate_api {
  size_t size;
  /* Address of the driver's own function, e.g. real("cuMemMap"); NULL if the driver has none of
   * that name. */
  void* (*real)(char const* symbol);
  /* Closes the gate. When it returns, no thread is inside a gated call and none enters until
   * open(). Returns 0, or ETIMEDOUT if a thread stayed inside beyond `deadline_ns`
   * (CLOCK_MONOTONIC); then the gate is as it was. */
  int (*close)(int64_t deadline_ns);
  /* Waits until every stream that was launched on is idle; only while closed. 0, ETIMEDOUT or ENOMEM. Never
   * a device-wide synchronisation, and it leaves streams that are being captured alone. */
  int (*wait_idle)(int64_t deadline_ns);
  void (*open)(void);
  /* From abort_begin() to abort_end() nothing that an expendable thread puts on the device reaches
   * the driver, what a closed gate held included: launches, and copies whose result the host does
   * not see at once, are dropped, they succeed undone; the rest returns CUDA_ERROR_NOT_PERMITTED.
   * Other threads go on. */
  void (*abort_begin)(void);
  void (*abort_end)(void);
  /* Exempts the calling thread from holding and failing (1), or not (0). */
  void (*exempt_thread)(int exempt);
  /* 1 while the calling thread is in a commit: no demand holds it. */
  void (*protect_thread)(int protect);
  /* A word in shared memory: the CLOCK_MONOTONIC nanosecond until which launches are held, 0 for
   * none. NULL: none. */
  void (*set_pause_word)(uint64_t const volatile* until_ns);
  /* A demand waits for a commit (1), or no longer (0): meanwhile neither a compute pause nor a demand holds any
   * thread, since the commit may wait for another one, or for what that has left to the submitter. */
  void (*set_urgent)(int urgent);
  /* A call waits while its stream is predicted to be busy for longer than this; 0: no bound. */
  void (*set_run_ahead)(int64_t nanoseconds);
  /* Gated calls that went to the driver since the process started. */
  uint64_t (*launches)(void);
  /* 1 while what the calling thread launches belongs to a micro-batch that may be discarded. */
  void (*expendable_thread)(int expendable);
  /* When the kernel, copy or graph that was executing at the last close() had ended
   * (CLOCK_MONOTONIC), as wait_idle() saw it; 0 if that is not known. */
  int64_t (*unit_ended)(void);
  /* A word in shared memory, {number: 32, chunks: 32}: while it asks for chunks and its value has
   * not been answered, threads that are neither exempt nor protected are held, so that the device
   * runs empty while the control thread is still waking. NULL: none. */
  void (*set_demand_word)(uint64_t const volatile* word);
  /* The demand with that value has been answered. */
  void (*demand_answered)(uint64_t demand);
  /* When a thread first saw the demand that stands in the word (CLOCK_MONOTONIC); 0: none did. */
  int64_t (*demand_seen)(void);
  /* While run-ahead is bounded: calls that find no room are left to a thread of the gate's, in their
   * order (1), or the calling thread waits for room (0). To be set before set_run_ahead. Bounded or not,
   * likewise with calls that others have not agreed to yet, and those behind them. */
  void (*set_deferred)(int deferred);
  /* Waits until all calls that were left to that thread have been made or, by an abort, dropped. Not
   * while the gate is closed by the calling thread. */
  void (*flush)(void);
  /* Calls that have been left to that thread since the process started. */
  uint64_t (*deferred)(void);
  /* The same by function, for indices from 0 until it returns 0. */
  int (*flushes)(size_t index, struct sluice_gate_flushes* of);
  /* Leaves the calling thread's commit to the gate's thread. When that has come to the last of what
   * was left to it before, it calls `decide`: 1, and all that, and what this thread launches until
   * commit_resolve(), is made; 0, and none of the latter is, as if the thread were expendable and
   * aborting. Returns 0 if nothing lies there, or commit_made() has not been called for another:
   * then decide at once. */
  int (*commit_begin)(int (*decide)(void* of), void* of);
  /* Ends the commit. `made` is called when all of it has been made. */
  void (*commit_end)(void (*made)(void* of), void* of);
  /* Waits until it is decided. 1: it will be made; 0: dropped; -1: neither until the deadline
   * (CLOCK_MONOTONIC). Until it is known other calls of this thread, the optimizer's, share the
   * commit's fate. */
  int (*commit_resolve)(int64_t deadline_ns);
  /* For measuring: units that take longer than this have events around them, so that unit_ended() is
   * known for them; 0: those that are longer than the bound and 250 us. */
  void (*mark_units)(int64_t nanoseconds);
  /* The longest of such units for index 0, and so on; returns 0 behind the last. */
  int (*long_unit)(size_t index, struct sluice_gate_long_unit* of);
  /* Waits until the last commit that was left has been made or dropped; 0 if the deadline
   * (CLOCK_MONOTONIC) passes first. */
  int (*commit_made)(int64_t deadline_ns);
  /* Makes a call that needs agreement, in its turn: it is left to the gate's thread (0), or has been
   * made (1) or dropped (2). Until it has been made its stream waits, and what depends on that. A thread
   * that is exempt, or inside of another call, makes it without asking. -1: an expendable thread's is not
   * made, since others would wait for what a discard drops, unless it can be dropped as well. */
  int (*make_agreed)(struct sluice_agreed_call const* call);
  /* The same after all that was left to the gate's thread: the calling thread waits for it. */
  int (*make_agreed_now)(struct sluice_agreed_call const* call);
  /* Counts the calling thread's micro-batches: tries of them, each from expendable_thread(1) on; 0 outside
   * of one. */
  uint64_t (*micro_batch)(void);
  /* Who asks the others; NULL: nobody does. To be set before the first launch. */
  void (*set_agreement)(struct sluice_agreement const* offered);
  struct sluice_agreement const* (*agreement)(void);
  /* 1 if the address lies in memory of the pool, which can change its owner. */
  int (*holds)(uint64_t address);
  /* Whether the stream is being captured. If so, the graph that becomes of it holds what `held` stands for,
   * and whatever is made of that graph: its launches need agreement. `held` is then released by the
   * agreement's `release`. NULL: only asks. */
  int (*attach_to_capture)(void* stream, void* held);
  /* For what needs agreement, and what nobody has to be asked about: lets the calling thread inside (1) if
   * its call would be made at once, lie in no queue and be part of nothing that can be dropped. Else 0:
   * make_agreed() knows what becomes of it. What the thread calls of the driver inside passes. */
  int (*enter_at_once)(void);
  /* After that. */
  void (*leave)(void);
  /* Returns when the device has done all that was launched before the call. No synchronisation of the context: streams
   * that are being captured are left alone, and so are their captures. */
  void (*wait_launched)(void);
  /* Has the process's launches watched, from now on until it ends. Once, and before it launches. 0, or -1 if launches would go past the gate (standard error says how), or there is a watcher. */
  int (*watch_launches)(struct sluice_launch_watcher const* watcher);
  /* A word in shared memory: the CLOCK_MONOTONIC nanosecond until which a launch of another process is expected, 0 for
   * none. Until then the bound of run-ahead is a third, and nothing begins that would end later after it than the whole
   * bound. NULL: none. */
  void (*set_announcement_word)(uint64_t const volatile* until_ns);
  /* Allocations of device memory are answered by these functions from now on until the process ends, as in a process
   * that shares its memory; `micro_batch_dropped` is not called. Once; not in a process that shares its memory. 0, or -1
   * if memory is offered already. */
  int (*offer_memory)(struct sluice_runtime_api const* of);
  /* While the gate is closed: memory of the process is not there (1), so that a thread which is held wants it back; or it
   * is there again (0). */
  void (*set_parked)(int parked);
  /* As close(); also no thread is inside a call that names memory and puts nothing on the device, as the making of a graph
   * does. A closed gate holds such calls, but close() does not wait for them. */
  int (*close_all)(int64_t deadline_ns);
};

enum sluice_alloc_status {
  SLUICE_ALLOC_OK = 0,
  SLUICE_ALLOC_NOT_OURS = 1,
  SLUICE_ALLOC_OUT_OF_MEMORY = 2
};

/* What the runtime offers to the gate. `device` is the driver's ordinal of the current context. */
struct sluice_runtime_api {
  size_t size;
  /* cuMemAlloc from the pool's persistent range. NOT_OURS: let the driver answer. */
  int (*mem_alloc)(int device, uint64_t* address, size_t bytes);
  /* cuMemFree, of what nothing on the device uses any more. NOT_OURS: the address is not the pool's. */
  int (*mem_free)(uint64_t address);
  /* cuMemGetInfo as the job should see it: what cuMemAlloc would find without waiting, and the pool.
   * NOT_OURS: let the driver answer. */
  int (*mem_info)(int device, size_t* free_bytes, size_t* total_bytes);
  /* cuMemGetAddressRange for addresses of the persistent range: one allocation, as the driver would
   * say it. */
  int (*address_range)(uint64_t address, uint64_t* base, size_t* bytes);
  /* 1 if the address lies in memory of the pool, persistent or not. */
  int (*holds)(uint64_t address);
  /* Other processes have dropped the micro-batch that is running here, as long as `is_running(which)` is 1:
   * to be asked where no abort can end meanwhile. It may have been discarded since, and the next one runs. */
  void (*micro_batch_dropped)(int (*is_running)(void const* which), void const* which);
  /* A thread is held while memory is not there (`set_parked`). From inside calls of the driver, with any locks of the
   * program held; it only leaves word. */
  void (*launch_wanted)(void);
  /* The same thread waits in a call of that name since then (CLOCK_MONOTONIC nanoseconds). The name stays valid. Like
   * launch_wanted it is called again and again, and only leaves word. */
  void (*launch_held)(char const* call, int64_t since_ns);
  /* For cuMemCreate: chunks of the pool for `bytes`, which are mapped nowhere that the program knows of. NULL, here and below, where
   * there is nothing of the kind. NOT_OURS: let the driver answer. */
  int (*piece_make)(int device, uint64_t* piece, size_t bytes);
  /* Maps all of its chunks at addresses of the program's that nothing is mapped at, or for 0 nowhere again. Nothing on the device uses
   * them. NOT_OURS: it could not, and nothing has changed. */
  int (*piece_move)(uint64_t piece, uint64_t address);
  void (*piece_free)(uint64_t piece);
  /* Size of a chunk; 0: that device is not shared. */
  size_t (*chunk_bytes)(int device);
};

/* Exported by the runtime library. Returns its table, or NULL if this process does not share (the
 * reason has been printed): the gate then lets everything straight through. `gate` stays valid for
 * the life of the process. */
struct sluice_runtime_api const* sluice_runtime_attach(struct sluice_gate_api const* gate,
                                                       int device);

#ifdef __cplusplus
}
#endif
#endif
/* NOLINTEND(modernize-*,readability-identifier-naming) */
