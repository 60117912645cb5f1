/*
 * A demand for the arena's memory: the step's thread, the control thread that answers, the server
 * (runtime/step/micro_batch_cycle.cpp, demand_answers.cpp; memhandover/client/detail/acquisition.cpp).
 *
 * The memory is one unit that the arena has or has not. That a closed gate keeps everybody out is gate.pml's business: here
 * entering is one step. Patience may end at any time, so that what follows it is met in every state.
 *
 *   -DDEATH        the training process may be killed at any instant
 *   -DDEFERRED     the step's thread leaves its launches, and commits behind them, to a submitter
 *                  (runtime/gate/submission.cpp)
 *   -DPATIENT      a demand holds launches until it is answered; needed for `served` and `trains`
 *   Each of these takes something away, and something must then be found wrong:
 *   -DNO_RECHECK   the control thread does not look for a commit again behind the closed gate
 *   -DNO_ABORT     the gate opens without dropping what is left of the micro-batch
 *   -DNO_VICTIM    what is left of any micro-batch is dropped, also of one that has begun since
 *   -DNO_DRAIN     the device is not waited for
 *   -DNO_STALE     the submitter does not ask whether a launch is left from before the last abort
 *   -DNO_FLUSH     a commit that is left to the submitter ends although its launches have not been made
 *   -DNO_GROUP     the submitter makes the launches of a commit that it has dropped
 *   -DNO_VERDICT   a launch that goes straight does not ask whether its commit has been dropped
 *   -DNO_WAIT      a micro-batch begins although the last commit's launches have not been made
 */
#ifndef DEMANDS
#define DEMANDS 3
#endif
#ifndef LAUNCHES
#define LAUNCHES 2
#endif
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
bit committed;            /* the last micro-batch; until the next begins */
bit killed, step_ended, control_ended, submitter_ended, gone;

#ifdef DEFERRED
#define QUEUE 2
mtype = { launched, of_commit, commit_begins, commit_ends };
byte stale;               /* of the launches left, the first so many are from before the last abort ended */
bit submitting;           /* the submitter has taken a launch out and not made it yet */
bit undecided;            /* a commit has been left, and whether it counts is open */
bit unmade;               /* a commit has been left whose end the submitter has not come to */
bit dropped;              /* the last commit that it has come to; what it finds from then on belongs to no earlier one */
/* What it is, whether it uses the memory, whether it is expendable, whether it is protected. */
chan calls = [QUEUE] of { mtype, bit, bit, bit };
#define left() (len(calls) + submitting)
#define flush() left() == 0
#define end_abort() atomic { stale = left() }; aborting = 0
#else
#define end_abort() aborting = 0
#endif

#define lock() atomic { !mutex -> mutex = 1 }
#define unlock() mutex = 0

/* Whether a launch reaches the device, in `passed`. */
inline enter(may_drop, spared) {
  do
  :: atomic { !closed && !(aborting && may_drop) && (!(demanded && !answered) || spared) -> inside = 1; passed = 1; break }
#ifndef PATIENT
  :: atomic { !closed && !(aborting && may_drop) && demanded && !answered && !spared -> inside = 1; passed = 1; break }
#endif
  :: atomic { !closed && aborting && may_drop -> passed = 0; break }
  od
}
#define leave() inside = 0

/* The step's thread launches something. */
inline launch() {
#ifdef DEFERRED
  if
  :: atomic { aborting && expendable -> dropped_new = (state == sound) }
  :: atomic { !(aborting && expendable) -> calls!launched,mine,expendable,protect }
  fi
#else
  enter(expendable, protect);
  if
  :: passed ->
     queued < RUN_AHEAD; queued = queued + mine;
     leave()
  :: !passed ->
     assert(expendable);
     dropped_new = (state == sound)
  fi
#endif
}

#ifdef DEFERRED
/*
 * It launches something that is made only with its commit. Where nothing lies in the queue that may go straight. So may any
 * other launch, which is as if the submitter made it at once.
 */
inline launch_with_commit(uses) {
  if
  :: calls!of_commit,uses,expendable,protect
#ifdef NO_VERDICT
  :: atomic { left() == 0 && !closed && (protect || !demanded || answered) -> inside = 1 };
#else
  :: left() == 0 && dropped
  :: atomic { left() == 0 && !dropped && !closed && (protect || !demanded || answered) -> inside = 1 };
#endif
     queued < RUN_AHEAD; queued = queued + uses;
     leave()
  fi
}

/*
 * It leaves its commit behind what lies there. Whether the micro-batch has its memory the submitter will see, when it comes
 * to that or, at any time, earlier; then the step's thread goes on.
 */
inline leave_commit() {
  atomic { calls!commit_begins,0,0,0; undecided = 1; unmade = 1; expendable = 0; protect = 1 };
  launch_with_commit(mine);
#ifdef NO_FLUSH
  if
  :: phase == committing -> lock(); phase = idle; unlock()
  :: dropped
  fi;
#endif
  atomic { calls!commit_ends,0,0,0; protect = 0 };
  launch_with_commit(0); /* the optimizer */
  !undecided;
  if
  :: dropped -> !unmade
  :: !dropped
  fi;
  failed = dropped;
  made = !dropped;
  assert(made || state != sound)
}
#endif

inline replace_arena() {
  lost = 0;
  has = 0;
  generation = (generation + 1) % 4
}

proctype step() {
  bit passed, mine, failed, made;
  byte n;
  {
next:
    do
#ifdef DEFERRED
#ifdef NO_WAIT
    :: lock();
#else
    :: !unmade; lock();
#endif
#else
    :: lock();
#endif
       if
       :: lost -> replace_arena(); end_abort()
       :: else
       fi;
       state = sound;
       phase = running;
       committed = 0;
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
          launch()
       :: n == LAUNCHES -> break
       od;
       if
#ifdef DEFERRED
       :: flush() -> failed = 0
       :: left() > 0 && state == sound -> leave_commit()
#else
       :: failed = 0
#endif
#ifndef PATIENT
       :: failed = 1 /* an exception of the program's own */
#endif
       :: state != sound -> failed = 1 /* an exception because of what was not done */
       fi;
#ifdef DEFERRED
       if
       :: made -> made = 0; committed = 1; goto next
       :: !made
       fi;
#endif
       lock();
       if
       :: state == sound && !failed ->
          phase = committing;
          unlock();
          expendable = 0;
          protect = 1;
          launch();
#ifdef DEFERRED
          flush();
#endif
          assert(!lost);
          protect = 0;
          lock();
          phase = idle;
          unlock();
          committed = 1
       :: state != sound || failed ->
          unlock();
          expendable = 0;
          lock();
          phase = idle;
          if
          :: lost -> replace_arena()
          :: else
          fi;
          state = sound;
          end_abort();
          unlock()
       fi
    od
  } unless { killed };
  step_ended = 1
}

#ifdef DEFERRED
inline decide() {
  lock();
  if
  :: state == sound -> phase = committing; going = 1; dropped = 0
  :: else -> dropped = 1
  fi;
  undecided = 0;
  unlock()
}

proctype submitter() {
  mtype what;
  bit passed, uses, may_drop, spared;
  bit going; /* the commit: what lies before its end is protected */
  {
end:
    do
    :: undecided -> decide()
    :: atomic { calls?what,uses,may_drop,spared -> submitting = 1 }
       if
       :: what == commit_begins && undecided -> decide()
       :: what == commit_begins && !undecided
       :: what == commit_ends && going ->
          lock();
          assert(!lost);
          phase = idle;
          unlock();
          going = 0
       :: what == commit_ends && !going
#ifndef NO_GROUP
       :: what == of_commit && dropped
       :: what == launched || what == of_commit && !dropped ->
#else
       :: what == launched || what == of_commit ->
#endif
          spared = spared || going;
          enter(may_drop, spared);
          if
#ifdef NO_STALE
          :: passed ->
#else
          :: passed && (!may_drop || !stale) ->
#endif
             queued < RUN_AHEAD; queued = queued + uses;
             leave()
#ifndef NO_STALE
          :: passed && may_drop && stale -> leave()
#endif
          :: !passed -> dropped_new = (!stale && phase == running && state == sound)
          fi
       fi;
       atomic {
         submitting = 0;
         unmade = unmade && what != commit_ends;
         stale = (stale > 0 -> stale - 1 : 0)
       }
    od
  } unless { killed };
  submitter_ended = 1
}
#endif

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
#ifdef DEFERRED
  submitter_ended;
#endif
  /* The driver ends what is on the device before the process is gone. */
  queued == 0;
  gone = 1
}
#endif

init {
  atomic {
    run step();
    run control();
#ifdef DEFERRED
    run submitter();
#endif
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
