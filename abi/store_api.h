/* The store through which ranks on several hosts agree, as libsluice_store.so offers it: torch's
 * c10d::TCPStore behind a table in C, since the library that is preloaded into all processes of a
 * job links no torch.
 *
 * Calls of one store take effect in the order in which they are made, also those that nobody waits
 * for (`set`). Everything may be called from any thread. No exception comes out; a call that fails
 * returns -1 and says why. After that the store must not be used any more, but closed: what it
 * answers would be out of step.
 */
/* C has its own names and headers. */
/* NOLINTBEGIN(modernize-*,readability-identifier-naming) */
#ifndef SLUICE_ABI_STORE_API_H
#define SLUICE_ABI_STORE_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct sluice_store;

struct sluice_store_error {
  char text[256];
};

/* A value that is given … */
struct sluice_store_value {
  void const* at;
  size_t size;
};
/* … and room for one that is asked for. `size` becomes its size; 0 if there is none. */
struct sluice_store_room {
  void* at;
  size_t size;
};

struct sluice_store_api {
  size_t size; /* of this table */
  /* Connects to where a server listens; NULL if there is none within `patience_ms`. No call takes
   * longer than that. */
  struct sluice_store* (*open)(char const* host, uint16_t port, int64_t patience_ms,
                               struct sluice_store_error* why);
  void (*close)(struct sluice_store* store);
  /* Sets so many keys, in this order; not waiting for an answer. */
  int (*set)(struct sluice_store* store, char const* const* keys,
             struct sluice_store_value const* values, size_t count, struct sluice_store_error* why);
  /* Sets the key to `desired` if it is `expected`, or if there is no such key and `expected` is
   * empty; `found` is what it is then. */
  int (*compare_set)(struct sluice_store* store, char const* key,
                     struct sluice_store_value const* expected,
                     struct sluice_store_value const* desired, struct sluice_store_room* found,
                     struct sluice_store_error* why);
  /* One key may be missing; of several each has to be there. */
  int (*get)(struct sluice_store* store, char const* const* keys, struct sluice_store_room* into,
             size_t count, struct sluice_store_error* why);
  /* Adds to a number that is 0 at first; `sum` is what it is then. */
  int (*add)(struct sluice_store* store, char const* key, int64_t summand, int64_t* sum,
             struct sluice_store_error* why);
  int (*remove)(struct sluice_store* store, char const* key, struct sluice_store_error* why);
};

/* What libsluice_store.so exports. */
struct sluice_store_api const* sluice_store_table(void);

#ifdef __cplusplus
}
#endif
#endif
/* NOLINTEND(modernize-*,readability-identifier-naming) */
