/* What tests can ask of the fake driver, beside calling it as a driver. Reach these by dlsym.
 *
 * The fake driver stands in for libcuda.so.1 where there is no GPU: device memory is host memory, a
 * stream is a thread that does its work in order, a kernel is a function of the test. It keeps the
 * real driver's rules where Sluice depends on them: a physical handle is mapped and unmapped whole,
 * access is enforced, an imported handle cannot be exported again, one name has two functions
 * depending on the default-stream flag, calls that could break a capture do break it, a copy from or
 * to reserved addresses without a mapping is refused, and a kernel that touches one takes the
 * process's context down.
 *
 * Environment, read when the library is loaded:
 *   FAKE_CUDA_DEVICES       number of devices, 1
 *   FAKE_CUDA_MEMORY_BYTES  memory of each device, 1 GiB
 *   FAKE_CUDA_FAIL          SYMBOL:CODE[:SKIP];...   as fake_fail
 *   FAKE_CUDA_DELAY         SYMBOL:NANOSECONDS;...   as fake_delay
 *
 * Not modelled: implicit ordering between the legacy default stream and others, arrays and
 * textures, what is in a module: every one has the kernels of fake_modules.cpp.
 */
#ifndef SLUICE_TESTS_FAKE_DRIVER_H
#define SLUICE_TESTS_FAKE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The calls of `symbol` after the next `skip` ones fail with `code` before they do anything; code
 * 0: no more. */
void fake_fail(char const* symbol, int code, unsigned skip);
/* The same for one call. */
void fake_fail_once(char const* symbol, int code, unsigned skip);
/* Calls of `symbol` that have failed because a test wanted it. */
uint64_t fake_failures(char const* symbol);
/* Every call of `symbol` takes that much longer, inside the driver. */
void fake_delay(char const* symbol, int64_t nanoseconds);
/* Calls of `symbol` so far, and those that are inside now. */
uint64_t fake_calls(char const* symbol);
uint64_t fake_calls_inside(char const* symbol);

typedef void (*fake_kernel_body)(void** parameters);
/* A CUfunction that takes `count` parameters of the given sizes, needs `nanoseconds` on the device,
 * then runs `body` (which may be NULL) with pointers to copies of the parameters. Never freed. */
void* fake_register_kernel(fake_kernel_body body, size_t const* sizes, size_t count,
                           int64_t nanoseconds);

/* From now on cuGetProcAddress answers for `name` with `function`, as a newer driver might; NULL:
 * as before. */
void fake_answer(char const* name, void* function);

/* Pieces of work submitted to any stream and not done yet, and the most there were of them at once
 * since the last call of fake_outstanding_peak. */
uint64_t fake_outstanding(void);
uint64_t fake_outstanding_peak(void);
/* What this process holds of virtual memory management: address reservations, mappings in them,
 * handles. */
uint64_t fake_reservations(void);
uint64_t fake_mappings(void);
uint64_t fake_handles(void);
/* Captures that were broken by a forbidden call. */
uint64_t fake_broken_captures(void);

#ifdef __cplusplus
}
#endif
#endif
