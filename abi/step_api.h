/* The C boundary of the training runtime (libsluice_runtime.so), for the Python package, torch's
 * pluggable allocator and the host allocator. Independent of the Python and torch versions.
 * Functions that can fail return a status and leave a sentence in sluice_last_error() of the
 * calling thread. Nothing throws.
 *
 * One micro-batch:
 *
 *   begin ─► forward, backward ─► commit_begin ─1,2─► add gradients ─► commit_end ─► commit_resolve ──1──► it counts
 *                  │                    └──0──► discard                                    └──0──► discard
 *                  └── exception ─► discard
 *
 * A discarded micro-batch had its memory taken away: run it again.
 */
/* C has its own names and headers. */
/* NOLINTBEGIN(modernize-*,readability-identifier-naming) */
#ifndef SLUICE_ABI_STEP_API_H
#define SLUICE_ABI_STEP_API_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SLUICE_EXPORT __attribute__((visibility("default")))

enum sluice_status {
  SLUICE_OK = 0,
  SLUICE_CANCELLED = 1,     /* the micro-batch's memory has been taken away */
  SLUICE_OUT_OF_MEMORY = 2, /* the pool has no more to give at present */
  SLUICE_FAILED = 3
};

/* What has become of the arena since the last sluice_begin. */
enum sluice_arena_state {
  SLUICE_ARENA_SOUND = 0,
  SLUICE_ARENA_REVOKED = 1, /* taken away by a demand */
  SLUICE_ARENA_STARVED = 2  /* an allocation did not fit */
};

SLUICE_EXPORT char const* sluice_last_error(void);

/* Joins the pool with the host backend. 0 if the process shares the host's memory from now on; an
 * error if it is the GPU's that it shares. On CUDA the gate joins by itself. */
SLUICE_EXPORT int sluice_join_host(void);
/* 0: this process does not share; 1: host; 2: CUDA. */
SLUICE_EXPORT int sluice_backend(void);

/* 1 while an inference server is attached to the pool, which may ask for the arena. */
SLUICE_EXPORT int sluice_serving(void);

/* Starts a micro-batch of `micro_batch` samples of a global batch on the calling thread: on CUDA
 * what this thread launches, and nobody else's work, belongs to it. */
SLUICE_EXPORT int sluice_begin(uint32_t micro_batch, uint32_t global_batch);
/* Number of the arena that allocations go to: it changes when a new one takes the place of a
 * revoked one. */
SLUICE_EXPORT uint64_t sluice_generation(void);
SLUICE_EXPORT int sluice_arena_state(void);
/* 1: the micro-batch is whole and protected until sluice_commit_end; 0: discard it. 2, only if it
 * `may_defer`: sluice_commit_resolve will tell. */
SLUICE_EXPORT int sluice_commit_begin(int may_defer);
/* `outlived`: on CUDA, whether something made in the micro-batch lives on; its arena is then kept
 * for it, and not handed over any more. */
SLUICE_EXPORT void sluice_commit_end(uint32_t samples, int outlived);
/* 1: the commit counts. 0: discard the micro-batch; nothing that the thread has launched since
 * sluice_commit_begin has been done. -1: neither is known after `timeout_ms`; ask again. */
SLUICE_EXPORT int sluice_commit_resolve(uint32_t timeout_ms);
/* 1: what the last commit that counts has launched is with the device, so that sluice_begin need not
 * wait for that. 0: not after `timeout_ms`; ask again. */
SLUICE_EXPORT int sluice_commit_made(uint32_t timeout_ms);
/* 1: micro-batches work together with those of other processes, through collectives in forward or backward: all
 * keep one, or all run it again. On the host each collective, and sluice_commit_begin, is asked about first
 * (sluice_agree). */
SLUICE_EXPORT void sluice_work_together(int together);
/* They end with this communicator of NCCL (an ncclComm_t), which has all ranks that work together; those of others that
 * a micro-batch uses must be among them. Else with the first that one uses. 1, or 0 if its ranks do not agree. */
SLUICE_EXPORT int sluice_end_with(void* communicator);
/* Ends the micro-batch without counting it; the gate lets launches through again. */
SLUICE_EXPORT void sluice_discard(void);
/* Nanoseconds that micro-batches have run for in vain: from their beginning until their memory went. */
SLUICE_EXPORT uint64_t sluice_discarded_ns(void);
/* When launches were let through again after memory of a micro-batch had gone last (CLOCK_MONOTONIC
 * nanoseconds); 0: never. */
SLUICE_EXPORT int64_t sluice_reopened_ns(void);
/* Allocations of discarded micro-batches that are still referenced. */
SLUICE_EXPORT uint64_t sluice_survivors(void);
/* The calling thread's allocations go to the arena (1) or not (0); host backend only. */
SLUICE_EXPORT void sluice_enter(int enter);

/* Bytes that the arena could have now: what it holds, and what the pool would grant. */
SLUICE_EXPORT uint64_t sluice_arena_capacity(void);
/* Most bytes that have been in use at once since sluice_begin. */
SLUICE_EXPORT uint64_t sluice_arena_peak(void);
SLUICE_EXPORT uint64_t sluice_pool_bytes(void);
/* Bytes of the pool that the arena might have one day: all that this job does not keep for good. */
SLUICE_EXPORT uint64_t sluice_reachable_bytes(void);
/* Who holds the pool's memory, and what would leave this process more of it: two sentences, valid
 * until the thread's next call; empty if the process does not share. */
SLUICE_EXPORT char const* sluice_shortage(void);
/* Whether the runtime itself says so on standard error, once, when an allocation of the driver's
 * does not fit (1, as at first), or somebody else does it better (0). */
SLUICE_EXPORT void sluice_say_shortages(int say);
/* Waits until the arena could have `bytes`, at most `timeout_ms`; 1 if so. */
SLUICE_EXPORT int sluice_wait_memory(uint64_t bytes, uint32_t timeout_ms);

/* The planner of micro-batches (scheduler/recomputation.hpp); one for the process. `fixed`: always
 * `largest`. `may_recompute`: activations can be computed again in backward instead of being kept. */
SLUICE_EXPORT int sluice_plan_start(uint32_t largest, int fixed, int may_recompute);
/* Samples of the next micro-batch, and in *recompute whether its activations are to be computed again;
 * 0: wait until the arena could have *needed_bytes. */
SLUICE_EXPORT uint32_t sluice_plan_next(uint32_t remaining, uint64_t* needed_bytes, int* recompute);
/* A micro-batch has run in `bytes`; one of so many samples takes `at_first_bytes`, not less, as long as
 * it is not known how its tensors lie best. */
SLUICE_EXPORT void sluice_plan_committed(uint32_t samples, int recomputed, uint64_t bytes,
                                         uint64_t at_first_bytes, double seconds);
SLUICE_EXPORT void sluice_plan_discarded(uint32_t samples, int recomputed, int arena_state);

/* Segment provider for torch's MemPool on CUDA (signature of CUDAPluggableAllocator). */
SLUICE_EXPORT void* sluice_arena_alloc(ssize_t bytes, int device, void* stream);
SLUICE_EXPORT void sluice_arena_free(void* address, ssize_t bytes, int device, void* stream);

/* Host allocator: an address in *address, or a status. SLUICE_FAILED: let torch's own allocator
 * answer. */
SLUICE_EXPORT int sluice_host_alloc(void** address, size_t bytes);
/* 1 if the address was ours. */
SLUICE_EXPORT int sluice_host_free(void* address);
/* On the host: returns when no compute pause holds this thread. */
SLUICE_EXPORT void sluice_host_boundary(void);
/* The same before an operator, of which there may be others inside. The arena is not taken until the
 * outermost one of a thread that is in it has ended. */
SLUICE_EXPORT void sluice_host_operator_begin(void);
SLUICE_EXPORT void sluice_host_operator_end(void);
/* What runs from here to the end only calls operators, and is none itself: neither is the one that it may
 * have been called in until then. The arena may be taken between those that it calls. */
SLUICE_EXPORT void sluice_host_caller_begin(void);
SLUICE_EXPORT void sluice_host_caller_end(void);

/* A rank's place in a group of some. */
struct sluice_place {
  unsigned rank;
  unsigned ranks;
};

/* Ranks of a job on one host, which agree on their collectives. All join by a key that no other ranks know: the first is
 * that of all, which end micro-batches together, others are those of groups of some of them, in whose collectives this
 * rank takes part. When all have returned from that, each says which of them it is in each. SLUICE_OK or SLUICE_FAILED.
 * Others may be joined later: they take the place of these. */
SLUICE_EXPORT int sluice_ranks_join(char const* const* keys, unsigned groups);
SLUICE_EXPORT int sluice_ranks_complete(struct sluice_place const* in_each);

/* What a rank is about to do; all must mean the same. */
struct sluice_collective {
  uint64_t operation;
  uint64_t type;
  uint64_t count;
  uint64_t root;
};

enum sluice_answer {
  SLUICE_LATER = 0,   /* ask again */
  SLUICE_GRANTED = 1, /* make it, and say so by sluice_agree_made */
  SLUICE_DROPPED = 2, /* the micro-batch runs again */
  SLUICE_LOST = 3,    /* a rank has died: sluice_ranks_loss */
  SLUICE_DIFFERS = 4  /* ranks mean different calls by it: sluice_ranks_difference */
};

/* Asks the other ranks of a group, by the order of its key, about the calling thread's next collective, which is part of
 * its micro-batch (`inside`) or not, and waits up to `timeout_ms`. From SLUICE_GRANTED until sluice_agree_made the arena
 * is not taken, and whatever the process allocates lies outside of the pool. One thread at a time. */
SLUICE_EXPORT int sluice_agree(unsigned group, struct sluice_collective const* what, int inside,
                               uint32_t timeout_ms);
/* What was granted has been made, or has failed. */
SLUICE_EXPORT void sluice_agree_made(void);
/* Takes a question back. SLUICE_GRANTED if it was too late for that, and it has not been made yet: make it; else
 * SLUICE_DROPPED, on all ranks. */
SLUICE_EXPORT int sluice_agree_withdraw(void);
/* The number of the calling thread's last question; all ranks of its group have the same. */
SLUICE_EXPORT uint64_t sluice_ranks_number(void);
/* The ranks of its group that have not come to the open question, into `ranks`, at most `most`; how many there are. */
SLUICE_EXPORT unsigned sluice_ranks_missing(unsigned* ranks, unsigned most);
/* Who of all is lost: a few words, valid until the thread's next call; empty if nobody. */
SLUICE_EXPORT char const* sluice_ranks_loss(void);
/* Two ranks of its group that differ, and what they mean by the number. 0 if none do. */
SLUICE_EXPORT int sluice_ranks_difference(uint64_t* number, unsigned ranks[2],
                                          struct sluice_collective calls[2]);

#ifdef __cplusplus
}
#endif
#endif
/* NOLINTEND(modernize-*,readability-identifier-naming) */
