/* A runtime library for the gate's tests: a pool of addresses, and a record of what the gate asked.
 */
#ifndef SLUICE_TESTS_TEST_RUNTIME_H
#define SLUICE_TESTS_TEST_RUNTIME_H

#include "abi/gate_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How often the gate attached, with which device last, and the table it gave. */
int test_runtime_attached(void);
int test_runtime_device(void);
struct sluice_gate_api const* test_runtime_gate(void);
/* Allocations up to `largest` bytes are answered from the pool, as long as `room` bytes are left in
 * it. */
void test_runtime_serve(size_t largest, size_t room);
/* Called when the gate says that others have dropped the micro-batch, as long as that runs. */
void test_runtime_on_drop(void (*called)(void* of, int (*is_running)(void const* which),
                                         void const* which),
                          void* of);
/* Allocations of the pool that live. */
int test_runtime_live(void);

#ifdef __cplusplus
}
#endif
#endif
