/* The C boundary of an engine's memory that comes and goes by the chunk (memhandover/client/elastic_space.hpp), in
 * libsluice_runtime.so. Whoever calls is an engine in the pool then, whether or not its process shares otherwise.
 *
 *   join ─► reserve ─► back ─► answer ─► … back, give_back, refuse_rest, rest …
 *
 * Functions that can fail return a status of step_api.h, and leave a sentence in sluice_last_error() of the calling thread.
 * Nothing throws. Any thread may call them. In a forked child they fail: its parent has the memory.
 */
/* C has its own names and headers. */
/* NOLINTBEGIN(modernize-*,readability-identifier-naming) */
#ifndef SLUICE_ABI_ELASTIC_API_H
#define SLUICE_ABI_ELASTIC_API_H

#include <stdint.h>

#include "abi/step_api.h"

#ifdef __cplusplus
extern "C" {
#endif

struct sluice_elastic;

/* For `device`: the pool on the host, whose number is SLUICE_DEVICE. */
#define SLUICE_ELASTIC_HOST (-1)

/* Joins the pool of that GPU, by CUDA's number, in the runtime folder that the environment names (SLUICE_RUNTIME_DIR), as an engine of
 * that name. Null if it cannot, as where SLUICE_DEVICE is another one. A pool that is not there is made, as `sluice run` makes it. */
SLUICE_EXPORT struct sluice_elastic* sluice_elastic_join(char const* name, int device);
/* Leaves the pool: nothing reaches its memory any more. A process that ends need not. */
SLUICE_EXPORT void sluice_elastic_leave(struct sluice_elastic* space);

SLUICE_EXPORT uint64_t sluice_elastic_chunk_bytes(struct sluice_elastic const* space);
SLUICE_EXPORT uint32_t sluice_elastic_pool_chunks(struct sluice_elastic const* space);

/* Addresses of so many chunks, without memory: an access faults. Once; before what follows. */
SLUICE_EXPORT int sluice_elastic_reserve(struct sluice_elastic* space, uint32_t chunks);
SLUICE_EXPORT void* sluice_elastic_base(struct sluice_elastic const* space);

/* Memory, zeroed, behind all of these chunks of the range, or none. SLUICE_OUT_OF_MEMORY if the pool does not grant it within
 * `patience_ms`; 0 asks once. */
SLUICE_EXPORT int sluice_elastic_back(struct sluice_elastic* space, uint32_t const* chunks,
                                      uint32_t count, uint32_t patience_ms);
/* Nothing reaches these any more: others may have them. On a GPU nothing that is in flight may use them. */
SLUICE_EXPORT int sluice_elastic_give_back(struct sluice_elastic* space, uint32_t const* chunks,
                                           uint32_t count);

/* From now on what others demand is waited for, until it is given or refused; `kept` chunks stay whatever is demanded. Before that nothing is
 * given to anybody. */
SLUICE_EXPORT int sluice_elastic_answer(struct sluice_elastic* space, uint32_t kept);
/* How many chunks are demanded and have not been given. A load of one word. */
SLUICE_EXPORT uint32_t sluice_elastic_demanded(struct sluice_elastic const* space);
/* The same, but waits up to `timeout_ms` until there are some, or there is an order that it goes, or it has gone and there is none
 * any more, or until it is roused. */
SLUICE_EXPORT uint32_t sluice_elastic_await_demand(struct sluice_elastic* space,
                                                   uint32_t timeout_ms);
/* Whoever waits there, or is the next to do so, waits no longer. */
SLUICE_EXPORT void sluice_elastic_rouse(struct sluice_elastic* space);
/* No more comes for what is demanded now. */
SLUICE_EXPORT void sluice_elastic_refuse_rest(struct sluice_elastic* space);
/* Of what is backed, what requests use now: for those who look. */
SLUICE_EXPORT void sluice_elastic_show_used(struct sluice_elastic* space, uint64_t bytes);

/* 1: somebody has ordered that all goes, and it has not. */
SLUICE_EXPORT int sluice_elastic_ordered_away(struct sluice_elastic const* space);
/* All has been given back: it is parked until the next sluice_elastic_back() that succeeds, which no one does while the order stands.
 * `needed` is how many chunks it then asks for. */
SLUICE_EXPORT int sluice_elastic_rest(struct sluice_elastic* space, uint32_t needed);

#ifdef __cplusplus
}
#endif
#endif
/* NOLINTEND(modernize-*,readability-identifier-naming) */
