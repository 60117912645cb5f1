/*
 * Who waits for whom: two threads of a job that trains, its control thread, and a server with two requests, each of which
 * holds a compute pause until its memory is there
 * (runtime/step/host_calls.cpp, operator_gate.cpp, demand_answers.cpp, training_allocation.cpp, micro_batch_cycle.cpp;
 * memhandover/client/detail/acquisition.cpp, serving_pool.cpp, ledger_writer.cpp; runtime/gate/gate.cpp, submission.cpp).
 *
 * No patience ever ends here, and no request has a deadline: what goes on only because somebody's patience ends is a
 * deadlock. No pause runs out (`min_share: 0%`). All that the two threads do, they do so many times, so that every run ends,
 * with each request served or refused and each micro-batch committed at last. Whoever waits looks again when something
 * changes.
 *
 * Left out: how a closed gate keeps everybody out (gate.pml), the device, launches from before an abort, and what is dropped
 * (handover.pml); other ranks (cut.pml); deaths, deadlines; that an operator waits, inside, for another thread's operator.
 * Chunks are counted, not named; the ledger's writer answers a request in the step in which it is made.
 *
 *   -DDRIVER        launches, which threads leave to a submitter, in place of operators
 *   -DDIRECT        each thread makes its launches itself (with DRIVER)
 *   -DDEFERRED      a commit is left to the submitter, too, where launches lie before it (with DRIVER)
 *   Each of these takes something away, and something must then be found wrong:
 *   -DNO_LEAVE      a function that calls operators counts as an operator
 *   -DNO_FIRST      a commit is granted only what the server neither waits for nor reserves
 *   -DWAIT_GRANTABLE whoever waits for the pool waits until it may grant something to anybody
 *   -DWAIT_COMMIT   a demand waits for a commit that waits for the pool
 *   -DNO_URGENT     a pause holds a commit that a demand waits for
 *   -DONLY_COMMIT   … and the other threads
 *   -DLET_FIRST     an allocation lets a demand go first that waits for a commit (with DRIVER)
 *   -DOWN_WAITS     a demand looks only at what the committing thread waits for (with DRIVER)
 *   -DNO_RECHECK    the control thread does not look for a commit again behind the closed gate
 *   -DNO_IDLE       it does not wait for operators that run
 *   -DPASS_BACK     a thread comes back to its operator though the gate is closed
 */
#ifndef TOTAL
#define TOTAL 3    /* chunks of the pool */
#endif
#ifndef RESERVE
#define RESERVE 1  /* that the server keeps free, where it can */
#endif
#ifndef BATCHES
#define BATCHES 2  /* commits of the step's thread */
#endif
#ifndef TURNS
#define TURNS 2    /* of the other thread */
#endif
#ifndef PARTS
#define PARTS 2    /* of what the second request needs, one chunk each; the first one needs all that there is */
#endif
#define WANTS(r) (r == 0 -> TOTAL : 1)
#define parts(r) (r == 0 -> 1 : PARTS)

#define STEP 0
#define OTHER 1

mtype = { idle, running, committing };

/* The ledger: chunks that are free, and that the server is waiting for. */
byte open_chunks = TOTAL;
byte wanted;
#define unreserved (open_chunks > RESERVE -> open_chunks - RESERVE : 0)
#define grantable (unreserved > wanted -> unreserved - wanted : 0)
#define more(a, b) (a > b -> a - b : 0)
/* What a request of this thread may have. */
#ifdef NO_FIRST
#define to_be_had(me) grantable
#else
#define to_be_had(me) (commits[me] -> open_chunks : grantable)
#endif
/* Whether a thread that waits goes on. */
#ifdef WAIT_GRANTABLE
#define may_have_more(me) (grantable > 0)
#else
#define may_have_more(me) (to_be_had(me) > 0 || stock > 0 || idle_arena)
#endif
#define idle_arena (arena && !used && !lost)

/* micro_batch_cycle.cpp, training_spaces.cpp */
mtype phase = idle;
bit sound = 1, lost;
byte stock;               /* chunks of the job that nothing uses */
bit arena, used;          /* the arena has its chunk; something lives in it */
bit kept[2];              /* the chunk of a thread that is no demand's */
bit commits[2];           /* the thread is between commit_begin and commit_end */
byte waits;               /* threads that wait for the pool, and that a commit may wait for */
bit urgent;               /* a demand waits for a commit */
bit answering;            /* the control thread has a demand */

/* The demand, as the ledger has it, and the mailbox's answer. */
byte number, count, done;
byte seen_answered;       /* by the gate */

bit pauses[2];            /* a claim of each request */
#define paused (pauses[0] || pauses[1])
#define turn(n) ((n + 1) % 4)

/* The gate. */
bit closed;
byte inside;              /* operators, or launches, that have begun */
byte computing;           /* operators that are at work themselves, and not in a function that they have called */

bit taken;                /* a lock of the program's, or of torch's: whoever has it may wait for what is not its own */
bit acquiring;            /* the server's: one acquisition at a time */
#define lock(which) atomic { !which -> which = 1 }
#define unlock(which) which = 0

/* Whether a pause holds the thread. */
#if defined(NO_URGENT)
#define is_held(me) (paused)
#elif defined(ONLY_COMMIT)
#define is_held(me) (paused && !(urgent && commits[me]))
#else
#define is_held(me) (paused && !urgent)
#endif

#ifdef DRIVER
#ifndef QUEUE
#define QUEUE 2
#endif
mtype = { of_batch, of_commit, of_other, decides, ends };
bit aborting;
bit submitting;           /* the submitter has taken a call and not made it yet */
bit undecided, dropped;   /* the commit that has been left to it */
bit unmade;
bit going;
chan calls = [QUEUE] of { mtype };
#define all_made (len(calls) == 0 && !submitting)

/* gate::judge; `spared` is the thread's `protect`. */
#define demand_holds (number != seen_answered)
#if defined(NO_URGENT)
#define may_enter(spared) (!closed && (spared || !demand_holds) && !paused)
#elif defined(ONLY_COMMIT)
#define may_enter(spared) (!closed && (spared || !demand_holds) && !(paused && !(urgent && spared)))
#else
#define may_enter(spared) (!closed && (urgent || spared || !demand_holds) && (urgent || !paused))
#endif

/*
 * dispatch, and dispatch_or_defer. What goes straight past an empty queue is as if the submitter made it at once; room in the
 * queue is what a thread waits for otherwise.
 */
inline launch(what, spared) {
  skip;
  if
  :: atomic { what == of_batch && aborting -> skip }
#ifdef DIRECT
  :: atomic { may_enter(spared) && !(what == of_batch && aborting) -> inside++ };
     inside--
#else
  :: atomic { !(what == of_batch && aborting) && len(calls) < QUEUE -> calls!what }
#endif
  fi
}
#ifdef DIRECT
#define flush() skip
#else
#define flush() all_made
#endif

/* What a thread launches, or what asks for an answer: that it makes itself, behind all that lies in the queue. */
inline computes(me, spared) {
  if
  :: launch((me == OTHER -> of_other : (spared -> of_commit : of_batch)), spared)
  :: me == OTHER -> flush()
  fi
}
#else
/*
 * operator_gate: entering is one step. A pause holds the thread before that, so that it is not inside; a pause that begins
 * then holds it before the next operator.
 */
inline operator_begins() { atomic { !closed -> inside++; computing++ } }
inline operator_ends() { atomic { inside--; computing-- } }
#ifdef NO_LEAVE
inline caller_begins() { atomic { !closed -> inside++ } }
inline caller_ends() { inside-- }
inline calls_from_operator() { atomic { computing-- } }
inline comes_back() { computing++ }
inline computes_in_caller(me) {
  !is_held(me); /* what begins is within what is inside */
  computing++; computing--
}
#else
inline caller_begins() { skip }
inline caller_ends() { skip }
inline calls_from_operator() { operator_ends() }
#ifdef PASS_BACK
inline comes_back() { atomic { inside++; computing++ } }
#else
inline comes_back() { operator_begins() }
#endif
inline computes_in_caller(me) {
  !is_held(me);
  operator_begins();
  operator_ends()
}
#endif

/* An operator; a caller with an operator in it, or only a boundary; an operator that has such a caller in it. */
inline computes(me, spared) {
  if
  :: skip; !is_held(me);
     operator_begins();
     if
     :: calls_from_operator();
        computes_in_caller(me);
        comes_back();
     :: skip
     fi;
     operator_ends()
  :: caller_begins();
     computes_in_caller(me);
     caller_ends()
  fi
}
#endif

#ifdef DRIVER
#define abort_launches() aborting = 1
#define end_abort() aborting = 0
#else
#define abort_launches() skip
#define end_abort() skip
#endif

/* training_allocation.cpp: what goes to the arena, or to persistent memory. `granted` chunks have come into the stock. */
inline ask(me, most) {
  granted = (to_be_had(me) < most -> to_be_had(me) : most);
  open_chunks = open_chunks - granted;
  stock = stock + granted;
  granted = 0
}
#if !defined(DRIVER)
#define has_let_demands_pass(me) 1
#elif defined(LET_FIRST)
#define has_let_demands_pass(me) (commits[me] || !answering)
#else
#define has_let_demands_pass(me) (commits[me] || !answering || phase == committing)
#endif
#if defined(DRIVER) && !defined(OWN_WAITS)
#define counts_wait(me) 1
#else
#define counts_wait(me) commits[me]
#endif
/* Persistent memory: an unused chunk, else one that the pool grants, else what the arena has and does not use, else it waits. */
inline allocate_kept(me) {
  do
  :: has_let_demands_pass(me) ->
     if
     :: atomic { stock > 0 -> stock--; kept[me] = 1 }
     :: atomic { stock == 0 -> ask(me, 2) };
        if
        :: atomic { stock > 0 -> stock--; kept[me] = 1 }
        :: atomic { stock == 0 && idle_arena -> arena = 0; kept[me] = 1 }
        :: atomic { stock == 0 && !idle_arena -> waits = waits + counts_wait(me) };
           may_have_more(me);
           waits = waits - counts_wait(me)
        fi
     fi;
     if
     :: kept[me] -> break
     :: !kept[me]
     fi
  od
}
/* Memory of the arena. What finds none goes on to the end of its micro-batch, which is then discarded. */
inline allocate_arena() {
  do
  :: has_let_demands_pass(STEP) ->
     if
     :: atomic { lost -> break }
     :: atomic { !lost && arena -> used = 1; break }
     :: atomic { !lost && !arena && stock > 0 -> stock--; arena = 1 }
     :: atomic { !lost && !arena && stock == 0 ->
          ask(STEP, 2);
          if
          :: stock > 0
          :: stock == 0 -> sound = 0; starved = 1; abort_launches(); break
          fi
        }
     fi
  od
}
/* On a GPU torch's allocator has a lock. */
inline allocates(me) {
#ifdef DRIVER
  lock(taken);
  allocate_kept(me);
  unlock(taken)
#else
  allocate_kept(me)
#endif
}
/* What was a thread's own. */
inline frees(me) {
#ifdef DRIVER
  open_chunks = open_chunks + kept[me];
#else
  stock = stock + kept[me];
#endif
  kept[me] = 0
}
/* What a commit does besides computing: it allocates, or takes the lock for something else. */
inline works_in_commit() {
  if
  :: skip; allocates(STEP)
  :: skip; lock(taken); unlock(taken)
  fi
}

#ifdef DEFERRED
/* The commit lies behind what the micro-batch has launched; `fails` if it was dropped. */
inline leave_commit() {
  atomic { calls!decides; undecided = 1; unmade = 1; commits[STEP] = 1 };
  works_in_commit();
  calls!of_commit;
  atomic { calls!ends; commits[STEP] = 0; frees(STEP) };
  atomic { !undecided -> fails = dropped };
  if
  :: atomic { fails && !unmade -> dropped = 0 }
  :: !fails -> left--
  fi
}
#endif

proctype step() {
  byte left = BATCHES, granted;
  bit starved, fails;
  do
  :: left > 0 ->
#ifdef DRIVER
     atomic { !unmade -> end_abort(); lost = 0; sound = 1; phase = running };
#else
     atomic { lost = 0; sound = 1; phase = running };
#endif
     allocate_arena();
     computes(STEP, 0);
#ifdef DRIVER
#ifdef DEFERRED
     if
     :: atomic { sound && !all_made && len(calls) < QUEUE -> skip }; leave_commit(); goto left_to_it
     :: all_made
     fi;
#else
     flush();
#endif
#endif
     if
     :: atomic { sound -> phase = committing; commits[STEP] = 1 };
        works_in_commit();
        computes(STEP, 1);
#ifdef DRIVER
        flush();
#endif
        atomic { assert(!lost); phase = idle; used = 0; commits[STEP] = 0; frees(STEP); left-- }
     :: atomic { !sound -> fails = 1 }
     fi;
#ifdef DEFERRED
left_to_it:
#endif
     if
     :: atomic { fails -> fails = 0; phase = idle; lost = 0; used = 0; sound = 1; end_abort() };
        if
        :: atomic { starved && (arena || stock > 0 || grantable > 0) -> starved = 0 }
        :: !starved
        fi
     :: !fails
     fi
  :: left == 0 -> break
  od
}

/* It trains as well, or feeds what trains; what it has allocated it keeps. */
proctype other() {
  byte left = TURNS, granted;
  do
  :: left > 0 ->
     left--;
     if
     :: skip; computes(OTHER, 0)
     :: skip; lock(taken); computes(OTHER, 0); unlock(taken)
     :: !kept[OTHER] -> allocates(OTHER)
     fi
  :: left == 0 -> break
  od
}

#ifdef DRIVER
proctype submitter() {
  mtype what;
end:
  do
  :: atomic { calls?what -> submitting = 1 };
     if
     :: atomic { what == decides ->
          undecided = 0;
          dropped = !sound;
          if
          :: sound -> phase = committing; going = 1
          :: else
          fi
        }
     :: atomic { what == ends ->
          if
          :: going -> assert(!lost); phase = idle; used = 0; going = 0
          :: else
          fi;
          unmade = 0
        }
     :: what == of_commit && dropped && unmade
     :: what == of_batch || what == of_other || what == of_commit && !(dropped && unmade) ->
        if
        :: atomic { may_enter((what == of_commit || going)) && !(what == of_batch && aborting) -> inside++ };
           inside--
        :: atomic { !closed && what == of_batch && aborting -> skip }
        fi
     fi;
     atomic { submitting = 0; what = 0 }
  od
}
#endif

/* demand_answers.cpp */
#ifdef DRIVER
#define unused stock
#else
#define unused (stock + idle_arena)
#endif
#ifdef WAIT_COMMIT
#define commit_holds_up (phase == committing && number == which)
#else
#define commit_holds_up (phase == committing && waits == 0 && number == which)
#endif
inline give(most) {
  given = given + (stock < most -> stock : most);
  stock = more(stock, most)
}
/* What needs no closed gate. The lock is held since it was looked whether a commit goes on. */
#define revokes (may_revoke && given < much && arena)
#ifdef DRIVER
inline give_unused() {
  if
  :: stock >= much || !revokes -> give((much - given))
  :: else
  fi
}
#else
inline give_unused() {
  give((much - given));
  if
  :: given < much && idle_arena -> arena = 0; given++
  :: else
  fi
}
#endif
inline await_commit_end() { atomic { !commit_holds_up -> urgent = 0; may_revoke = (phase != committing); give_unused() } }

proctype control() {
  byte which, much, given;
  bit may_revoke, revoked;
end:
  do
  :: atomic { number != which -> which = number; much = count; count = 0; may_revoke = 1 };
     answering = 1;
     atomic {
       if
       :: unused < much && phase == committing -> urgent = 1
       :: else -> give_unused()
       fi
     };
     do
     :: urgent -> await_commit_end()
     :: !urgent && revokes ->
        closed = 1;
#ifndef NO_IDLE
        inside == 0;
#endif
        atomic {
          if
#ifndef NO_RECHECK
          :: phase == committing -> closed = 0; urgent = 1
#endif
          :: else ->
             assert(phase != committing);
             if
             :: arena ->
#ifdef DRIVER
                assert(inside == 0);
                stock++; give((much - given)); revoked = 1;
#else
                assert(computing == 0);
                given++;
                closed = 0;
#endif
                arena = 0; lost = 1; sound = 0
             :: else -> closed = 0; give_unused()
             fi
          fi
        }
     :: !urgent && !revokes -> break
     od;
#ifdef DRIVER
     atomic { answering = 0; seen_answered = which };
     atomic { open_chunks = open_chunks + given; given = 0; much = 0; may_revoke = 0; done = which };
     if
     :: atomic { revoked ->
          if
          :: lost && phase == running -> aborting = 1
          :: else
          fi;
          closed = 0; revoked = 0
        }
     :: !revoked
     fi
#else
     atomic { answering = 0; open_chunks = open_chunks + given; given = 0; much = 0; may_revoke = 0; done = which }
#endif
  od
}

/* compute_pause.cpp, acquisition.cpp; the pause begins before the memory is demanded. */
proctype request(bit me) {
  byte before, had;
  bit demands;
  pauses[me] = 1;
  do
  :: atomic { !acquiring && had < parts(me) -> acquiring = 1; wanted = WANTS(me) };
     do
     :: atomic { !demands || done == number || open_chunks >= WANTS(me) ->
          if
          :: open_chunks >= WANTS(me) -> open_chunks = open_chunks - WANTS(me); had++; break
          :: open_chunks < WANTS(me) && (!demands || open_chunks > before) ->
             demands = 1;
             before = open_chunks;
             number = turn(number);
             count = WANTS(me) - open_chunks + (TOTAL - WANTS(me) < RESERVE -> TOTAL - WANTS(me) : RESERVE)
          :: open_chunks < WANTS(me) && demands && open_chunks <= before -> goto refused
          fi
        }
     od;
     atomic { wanted = 0; before = 0; demands = 0; acquiring = 0 }
  :: had == parts(me) -> break
  od;
  if
  :: 0 ->
refused:
     atomic { wanted = 0; before = 0; demands = 0; acquiring = 0 }
  :: else
  fi;
  pauses[me] = 0;
  open_chunks = open_chunks + had * WANTS(me)
}

init {
  atomic {
    run step();
    run other();
    run control();
#ifdef DRIVER
    run submitter();
#endif
    run request(0);
    run request(1)
  }
}
