/*
 * The gate: nothing is launched while whoever closed it has its proof (runtime/gate/gate.cpp).
 *
 * Stores are as a processor has them: a thread's own lie in its buffer and reach memory later, in their order; its loads
 * pass them. membarrier(2) makes every thread empty its buffer at some instant of the call.
 *
 *   -DFENCED      the kernel has no membarrier: each thread that enters has a barrier of its own
 *   -DNO_BARRIER  neither; the proof must then be found wrong
 */
#ifndef THREADS
#define THREADS 3
#endif
#ifndef PAUSES
#define PAUSES 2
#endif

bit closed;                             /* the bit of `mode_` */
bit inside[THREADS];                    /* the threads' slots, as memory has them */
chan stores[THREADS] = [2] of { bit };  /* what the threads have written there */
bit launching[THREADS];
bit proven;                             /* close() has succeeded, open() has not been called */

proctype memory(byte i) {
end:
  do
  :: stores[i]?inside[i]
  od
}

proctype thread(byte me) {
  bit seen;
end:
  do
  :: stores[me]!1;
#ifdef FENCED
     empty(stores[me]);
#endif
     seen = closed;
     if
     :: !seen ->
        launching[me] = 1;
        assert(!proven);
        launching[me] = 0;
        stores[me]!0
     :: seen ->
        stores[me]!0;
        !closed  /* await_change */
     fi
  od
}

proctype pauser() {
  byte i, n;
  for (n : 1 .. PAUSES) {
    closed = 1;
#if !defined(FENCED) && !defined(NO_BARRIER)
    for (i : 0 .. THREADS - 1) {
      empty(stores[i])
    }
#endif
    i = 0;
    do
    :: i == THREADS ->
       proven = 1;
       for (i : 0 .. THREADS - 1) {
         assert(!launching[i])
       }
       proven = 0;
       break
    :: i < THREADS && !inside[i] -> i++  /* once seen outside is enough */
    :: i < THREADS && inside[i] -> break /* the deadline has passed */
    od;
    closed = 0
  }
}

init {
  byte i;
  atomic {
    for (i : 0 .. THREADS - 1) {
      run memory(i);
      run thread(i)
    }
    run pauser()
  }
}

/* Whoever was held goes on afterwards. */
ltl goes_on { always eventually launching[0] }
