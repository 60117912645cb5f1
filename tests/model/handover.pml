/*
 * A demand for the arena's memory: the step's thread, the control thread that answers, the server
 * (runtime/step/training_memory.cpp, training_demands.cpp; memhandover/detail/acquisition.cpp).
 *
 * The memory is one unit that the arena has or has not. That a closed gate keeps everybody out is gate.pml's business: here
 * entering is one step. Patience may end at any time, so that what follows it is met in every state.
 *
 *   -DDEATH        the training process may be killed at any instant
 *   -DPATIENT      a demand holds launches until it is answered; needed for `served` and `trains`
 *   Each of these takes something away, and something must then be found wrong:
 *   -DNO_RECHECK   the control thread does not look for a commit again behind the closed gate
 *   -DNO_ABORT     the gate opens without dropping what is left of the micro-batch
 *   -DNO_VICTIM    what is left of any micro-batch is dropped, also of one that has begun since
 *   -DNO_DRAIN     the device is not waited for
 */
#ifndef DEMANDS
#define DEMANDS 3
#endif
#define LAUNCHES 2
#define RUN_AHEAD 2

mtype = { idle, running, committing, sound, revoked, starved, training, serving };

mtype owner = training;   /* of the memory, in the ledger */
bit stock = 1;            /* the job has it, and nothing is mapped there */
bit mutex;                /* of training_memory */
mtype phase = idle;
mtype state = sound;
bit has, lost;            /* the arena has the memory; has lost it and awaits its successor */
byte generation;          /* of the arena, modulo 4 */

bit closed, aborting;     /* the gate */
bit inside;               /* the step's thread is in a driver's call */
bit expendable, protect;  /* of the step's thread */
byte queued;              /* launches on the device that use the memory */
bit demanded, answered;
bit dropped_new;          /* something was dropped of a micro-batch that nothing was taken from */
bit committed;            /* turns with every commit */
bit killed, step_ended, control_ended, gone;

#define lock() atomic { !mutex -> mutex = 1 }
#define unlock() mutex = 0

/* Whether a launch reaches the device, in `passed`. */
inline enter() {
  do
  :: atomic { !closed && !(aborting && expendable) && (!(demanded && !answered) || protect) -> inside = 1; passed = 1; break }
#ifndef PATIENT
  :: atomic { !closed && !(aborting && expendable) && demanded && !answered && !protect -> inside = 1; passed = 1; break }
#endif
  :: atomic { !closed && aborting && expendable -> passed = 0; break }
  od
}
#define leave() inside = 0

inline replace_arena() {
  lost = 0;
  has = 0;
  generation = (generation + 1) % 4
}

proctype step() {
  bit passed, mine;
  byte n;
  {
    do
    :: lock();
       if
       :: lost -> replace_arena(); aborting = 0
       :: else
       fi;
       state = sound;
       phase = running;
       mine = 0;
       unlock();
       expendable = 1;
       n = 0;
       do
       :: n < LAUNCHES ->
          n++;
          lock(); /* allocate */
          if
          :: lost
          :: !lost && has -> mine = 1
          :: !lost && !has && stock -> stock = 0; has = 1; mine = 1
          :: !lost && !has && !stock -> state = starved; aborting = 1
          fi;
          unlock();
          enter();
          if
          :: passed ->
             queued < RUN_AHEAD; queued = queued + mine;
             leave()
          :: !passed ->
             dropped_new = (state == sound)
          fi
       :: n == LAUNCHES -> break
       od;
       lock();
       if
       :: state == sound ->
          phase = committing;
          unlock();
          expendable = 0;
          protect = 1;
          enter();
          assert(passed);
          queued < RUN_AHEAD; queued = queued + mine;
          leave();
          assert(!lost);
          protect = 0;
          lock();
          phase = idle;
          unlock();
          committed = !committed
       :: state != sound ->
          unlock();
          expendable = 0;
          lock();
          phase = idle;
          if
          :: lost -> replace_arena()
          :: else
          fi;
          state = sound;
          aborting = 0;
          unlock()
       fi
    od
  } unless { killed };
  step_ended = 1
}

proctype control() {
  byte victim;
  {
end:
    do
    :: demanded && !answered ->
       lock();
       do
       :: phase == committing -> unlock(); phase != committing; lock()
       :: else -> break
       od;
       if
       :: lost || !has ->
          if
          :: stock -> stock = 0; owner = serving
          :: else
          fi;
          unlock();
          answered = 1
       :: !lost && has ->
          do
          :: unlock();
             closed = 1;
             !inside;
#ifndef NO_DRAIN
             queued == 0;
#endif
             lock();
#ifdef NO_RECHECK
             break
#else
             if
             :: phase != committing -> break
             :: else ->
                closed = 0;
                do
                :: phase == committing -> unlock(); phase != committing; lock()
                :: else -> break
                od
             fi
#endif
          :: unlock(); lock(); goto nothing /* the deadline */
          od;
          if
          :: has && !lost ->
             victim = generation;
             lost = 1;
             state = revoked;
             unlock();
             owner = serving;
             answered = 1;
             lock(); /* unmapping; the server does not wait for it */
#ifndef NO_ABORT
             if
#ifdef NO_VICTIM
             :: phase == running -> aborting = 1
#else
             :: phase == running && generation == victim -> aborting = 1
#endif
             :: else
             fi;
#endif
             closed = 0;
             unlock()
          :: else ->
             closed = 0;
nothing:
             unlock();
             answered = 1
          fi
       fi
    od
  } unless { killed };
  control_ended = 1
}

proctype device() {
end:
  do
  :: queued > 0 ->
     assert(owner == training);
     queued--
  :: gone && queued == 0 -> break
  od
}

proctype server() {
  byte n;
  for (n : 1 .. DEMANDS) {
    answered = 0;
    demanded = 1;
    if
    :: answered
    :: gone -> owner = serving
    fi;
    demanded = 0;
    if
    :: owner == serving -> atomic { owner = training; stock = 1 } /* used, and given back */
    :: else
    fi
  }
}

#ifdef DEATH
proctype killer() {
  killed = 1;
  step_ended && control_ended;
  /* The driver ends what is on the device before the process is gone. */
  queued == 0;
  gone = 1
}
#endif

init {
  atomic {
    run step();
    run control();
    run device();
    run server();
#ifdef DEATH
    run killer()
#endif
  }
}

/* Every demand is answered, or its deadline passes; training goes on. */
ltl served { always (demanded implies eventually !demanded) }
ltl trains { always eventually (committed && eventually !committed) }
ltl spares { always !dropped_new }
