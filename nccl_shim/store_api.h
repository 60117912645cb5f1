/* The store through which ranks on several hosts agree, as libsluice_store.so offers it: torch's c10d::TCPStore
 * behind a table in C, since the library that is preloaded into all processes of a job links no torch.
 *
 * Calls of one store take effect in the order in which they are made, also those that nobody waits for (`set`).
 * Everything may be called from any thread. No exception comes out; a call that fails returns -1 and says why.
 * After that the store must not be used any more, but closed: what it answers would be out of step.
 */
#ifndef SLUICE_STORE_API_H
#define SLUICE_STORE_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_store sluice_store;

typedef struct sluice_store_error {
  char text[256];
} sluice_store_error;

typedef struct sluice_store_value {
  void* at;
  size_t
      size; /* of what is given; of what is asked for first the room, then what was found: 0 if nothing */
} sluice_store_value;

typedef struct sluice_store_api {
  size_t size; /* of this table */
  /* Connects to where a server listens; NULL if there is none within `patience_ms`. No call takes longer than
   * that. */
  sluice_store* (*open)(char const* host, uint16_t port, int64_t patience_ms,
                        sluice_store_error* why);
  void (*close)(sluice_store* store);
  /* Sets so many keys, in this order; not waiting for an answer. */
  int (*set)(sluice_store* store, char const* const* keys, sluice_store_value const* values,
             size_t count, sluice_store_error* why);
  /* Sets the key to `desired` if it is `expected`, or if there is no such key and `expected` is empty; `found`
   * is what it is then. */
  int (*compare_set)(sluice_store* store, char const* key, sluice_store_value const* expected,
                     sluice_store_value const* desired, sluice_store_value* found,
                     sluice_store_error* why);
  /* One key may be missing; of several each has to be there. */
  int (*get)(sluice_store* store, char const* const* keys, sluice_store_value* into, size_t count,
             sluice_store_error* why);
  /* Adds to a number that is 0 at first; `sum` is what it is then. */
  int (*add)(sluice_store* store, char const* key, int64_t summand, int64_t* sum,
             sluice_store_error* why);
  int (*remove)(sluice_store* store, char const* key, sluice_store_error* why);
} sluice_store_api;

/* What libsluice_store.so exports. */
sluice_store_api const* sluice_store_table(void);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_STORE_API_H */
